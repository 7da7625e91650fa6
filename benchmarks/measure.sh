#!/usr/bin/env bash
# Measure what the GPUs of this host allow, with one rank on each: ops and blocks, float8 MLPs, decode, data, context, expert and
# pipeline parallelism, memory kernels. With two GPUs also ops and blocks of 4 and 8 ranks, in mirror mode.
#
#     benchmarks/measure.sh OUT [PART...]     parts: memory ops blocks mlp rowwise dp dp_hosts dp_rivals dp_step dp_tp dp_hsdp
#                                             concurrent pp cp cp_causal ep decode decode_layers
#                                             and with two GPUs ops4 ops8 blocks4 blocks8 decode4 decode8
#
# Default: all but rowwise (float8 blocks by rows' scales, packed and apart), dp_hosts (data parallelism over NCCL, as across
# hosts), dp_rivals (against other systems), dp_step (the whole step in one graph), dp_tp and dp_hsdp (with tensor parallelism,
# and with replicas of the shards, on 4 GPUs or more), concurrent (a matmul next to a split collective), cp, cp_causal and ep
# (context and expert parallelism), decode4, decode8 and decode_layers. Every part has a time limit; those of the default parts
# add up to 24 minutes with two GPUs, else to 16.
# JSON files, and the output of all parts in log.txt, are in OUT. Tables are printed last.
set -u
shopt -s nullglob
cd "$(dirname "$0")/.."
out=${1:?usage: benchmarks/measure.sh OUT [PART...]}
shift
mkdir -p "$out"
: >"$out/log.txt"
failed=
gpus=$(nvidia-smi --list-gpus | wc -l)

part() {  # NAME SECONDS COMMAND...: run a part that writes OUT/NAME.json
    local name=$1 limit=$2 begin=$SECONDS
    shift 2
    echo "== $name: $*" >>"$out/log.txt"
    timeout -k 10 "$limit" "$@" --json "$out/$name.json" >>"$out/log.txt" 2>&1 || failed+=" $name"
    echo "$name: $((SECONDS - begin)) s"
}
ranks() { part "$1" "$2" torchrun --nproc-per-node "$gpus" -m "${@:3}"; }
ops() { ranks "$1" 100 benchmarks.ops "${@:2}" --suite quick --rows '*8192' --iters 15 --algorithms --budget-s 70; }
# plain: independent matmuls in bulk collectives only, nothing packed; apart: nothing packed; weights: packed without copies.
blocks() {
    ranks "$1" 150 benchmarks.blocks "${@:2}" --size 8b,70b --iters 15 --waterfall --ours 'ours={}' \
        --ours 'plain={"pack":"off","independent_matmuls":"bulk"}' --ours 'apart={"pack":"off"}' --ours 'weights={}' \
        --pack-weights weights --budget-s 120
}
mlp() {
    ranks mlp 150 benchmarks.blocks --model mlp --size 8b,70b --variants inductor,ours,compute,te,te_fp8 --iters 15 --host --waterfall \
        --ours 'bf16={}' --ours 'tensorwise={"fp8":"all"}' --ours 'delayed={"fp8":{"recipe":"delayed"}}' \
        --ours 'rowwise={"fp8":{"recipe":"rowwise"}}' --budget-s 120
}

mirrored=
[ "$gpus" -ne 2 ] || mirrored="ops8 ops4 blocks8 blocks4"
for name in ${*:-memory $mirrored ops blocks mlp dp pp decode}; do
    case $name in
    memory) part memory 60 python3 -m benchmarks.memory ;;
    ops8 | ops4) ops "$name" --mirror "${name#ops}" ;;
    ops) ops ops ;;
    blocks8 | blocks4) blocks "$name" --mirror "${name#blocks}" ;;
    blocks) blocks blocks --variants inductor,ours,compute,nocomm ;;
    mlp) mlp ;;
    rowwise) ranks rowwise 200 benchmarks.blocks --size 8b,70b --variants inductor,ours,compute --iters 15 --waterfall \
        --ours 'packed={"fp8":{"recipe":"rowwise"}}' --ours 'apart={"fp8":{"recipe":"rowwise"},"pack":"off"}' \
        --ours 'tensorwise={"fp8":"all"}' --budget-s 160 ;;
    # NCCL carries the collectives, as across hosts: as the assumed network decides, and split everywhere.
    dp_hosts) ranks dp_hosts 150 benchmarks.data_parallel --layers 4 --iters 10 --warm 3 --hosts 2 --graphs --budget-s 100 \
        --ours 'auto={}' --ours 'split={"overrides":[{"strategy":"split"}]}' \
        --ours 'zero3={"memory_budget":0,"overrides":[{"strategy":"split"}]}' ;;
    decode) ranks decode 100 benchmarks.decode --budget-s 70 ;;
    decode4 | decode8) ranks "$name" 60 benchmarks.decode --mirror "${name#decode}" --budget-s 40 ;;
    decode_layers) ranks decode_layers 260 benchmarks.decode --layers 8 --budget-s 200 --iters 15 --warm 3 --pack-weights \
        --ours 'ours={"pack":"off"}' --ours 'packed={}' ;;
    # The other systems of data parallelism: Inductor's overlap scheduling and low-contention collectives, FSDP2, DDP.
    dp_rivals) ranks dp_rivals 300 benchmarks.data_parallel --layers 4 --iters 10 --warm 3 --budget-s 240 \
        --variants compute,inductor,inductor_overlap,inductor_symm,fsdp2,fsdp2_ours,ddp,ddp_ours,ours \
        --ours 'auto={}' --ours 'zero3={"memory_budget":0}' ;;
    dp_step) ranks dp_step 200 benchmarks.data_parallel --layers 4 --iters 10 --warm 3 --graphs --budget-s 150 \
        --variants compute,inductor,step,step_ours,ours --ours 'ours={}' ;;
    dp_hsdp) ranks dp_hsdp 300 benchmarks.data_parallel --replicas 2 --layers 4 --iters 10 --warm 3 --graphs --budget-s 240 ;;
    dp_tp) ranks dp_tp 300 benchmarks.data_parallel --tp 2 --layers 4 --iters 10 --warm 3 --waterfall --budget-s 240 ;;
    concurrent) ranks concurrent 240 benchmarks.concurrent_matmul ;;
    dp) ranks dp 150 benchmarks.data_parallel --layers 4 --iters 10 --warm 3 --waterfall --budget-s 100 ;;
    cp) ranks cp 300 benchmarks.context_parallel --size 8b,70b --iters 10 --warm 3 --budget-s 240 ;;
    cp_causal) ranks cp_causal 300 benchmarks.context_parallel --causal --size 8b,70b --iters 10 --warm 3 --budget-s 240 ;;
    ep) ranks ep 300 benchmarks.expert_parallel --iters 10 --warm 3 --budget-s 240 ;;
    pp) ranks pp 240 benchmarks.pipeline --iters 10 --warm 3 --compile --schedules 1F1B,Interleaved1F1B,ZBVZeroBubble ;;
    *) echo "no part '$name'" >&2 && exit 2 ;;
    esac
done
[ -z "$failed" ] || { echo "failed:$failed; the end of $out/log.txt:" && tail -n 60 "$out/log.txt"; }
for file in "$out"/*.json; do python3 -m benchmarks.report "$file"; done
[ -z "$failed" ]
