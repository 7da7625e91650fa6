#!/usr/bin/env bash
# Measure what two GPUs allow: memory kernels, ops and blocks of 4 and 8 ranks in mirror mode, blocks of 2 ranks with waterfalls.
#
#     benchmarks/two_gpus.sh OUT [PART...]     parts: memory ops8 ops4 blocks2 blocks8 blocks4 (default: all, about 8 minutes)
#
# JSON files, and the output of all parts in log.txt, are in OUT. Tables are printed last. Every part has a time limit.
set -u
shopt -s nullglob
cd "$(dirname "$0")/.."
out=${1:?usage: benchmarks/two_gpus.sh OUT [PART...]}
shift
mkdir -p "$out"
: >"$out/log.txt"
failed=

part() {  # NAME SECONDS COMMAND...: run a part that writes OUT/NAME.json
    local name=$1 limit=$2 begin=$SECONDS
    shift 2
    echo "== $name: $*" >>"$out/log.txt"
    timeout -k 10 "$limit" "$@" --json "$out/$name.json" >>"$out/log.txt" 2>&1 || failed+=" $name"
    echo "$name: $((SECONDS - begin)) s"
}
ranks() { part "$1" "$2" torchrun --nproc-per-node 2 -m "${@:3}"; }
ops() { ranks "ops$1" 100 benchmarks.ops --mirror "$1" --suite quick --rows '*8192' --iters 20 --budget-s 70; }

for name in ${*:-memory ops8 ops4 blocks2 blocks8 blocks4}; do
    case $name in
    memory) part memory 60 python3 -m benchmarks.memory ;;
    ops8) ops 8 ;;
    ops4) ops 4 ;;
    blocks2) ranks blocks2 150 benchmarks.blocks --size 8b --variants inductor,ours,compute,nocomm --iters 15 --waterfall --budget-s 120 ;;
    blocks8) ranks blocks8 150 benchmarks.blocks --mirror 8 --size 8b,70b --iters 15 --waterfall --budget-s 120 ;;
    blocks4) ranks blocks4 150 benchmarks.blocks --mirror 4 --size 8b,70b --iters 15 --waterfall --budget-s 120 ;;
    *) echo "no part '$name'" >&2 && exit 2 ;;
    esac
done
[ -z "$failed" ] || { echo "failed:$failed; the end of $out/log.txt:" && tail -n 60 "$out/log.txt"; }
for file in "$out"/*.json; do python3 -m benchmarks.report "$file"; done
[ -z "$failed" ]
