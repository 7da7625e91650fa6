"""Train a tensor-parallel layer with and without overlap of its communication, on CPU or CUDA ranks.

    torchrun --standalone --nproc-per-node 4 examples/layer_with_overlap.py --layer block --num-replicas 2 --overlap force

A LayerNorm-MLP (--layer mlp) or a transformer block (--layer block) with sequence parallelism, sharded by DTensor's
parallelize_module and compiled by torch.compile(backend="ub_overlap"). Of W ranks, T = W / num_replicas share a layer: the
tensor-parallel groups are [0 .. T-1], [T .. 2T-1], ..., the data-parallel ones [0, T, ...], [1, T+1, ...], ..., averaged by
DistributedDataParallel, around the compiled layer or inside it (--ddp). --accumulate K sums K passes under no_sync. --fp8
computes the linears in float8 (docs/guide/float8.md), in both variants, by --fp8-recipe tensorwise, delayed or rowwise.

By default (--compare) the layer trains twice, alternating step by step on the same data and dropout masks: without and with
overlap. The table at the end has the median step times of the slowest rank and their ratio.

Exit code 0: the losses of both agree, and the replicas' weights; 1: they differ; 2: bad arguments (torchrun itself exits with 1
then). The bound on losses is a relative bound on rounding: sums in another order differ in the last bits, and training
amplifies that. A wrong gradient changes a loss far more in a few steps.

    layer/flags.py     the command line              layer/rng.py    dropout masks from DTensor's RNG tracker
    layer/model.py     the layers and their plan     layer/train.py  a training step, its phases and times
    layer/run.py       groups, variants, table       layer/replicas.py  DistributedDataParallel with DTensor, and graphs
"""

from __future__ import annotations

import os
import sys

# No NVLink multicast, and one compiler thread per rank instead of a pool. torch reads these when it is imported.
for _name, _value in (
    ("NCCL_NVLS_ENABLE", "0"),
    ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"),
    ("NVSHMEM_DISABLE_NVLS", "1"),
    ("TORCHINDUCTOR_COMPILE_THREADS", "1"),
):
    os.environ.setdefault(_name, _value)

from layer.run import main  # noqa: E402  (after the environment: it imports torch)

if __name__ == "__main__":
    # Exit at once: gloo's threads outlive their groups, and one that frees a tensor while the interpreter ends aborts
    # the process after a successful run (pytorch/pytorch#179291).
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
