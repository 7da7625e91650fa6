"""Measure a call's lookup in its dispatch table, against the same op with one strategy.

    python -m benchmarks.pick [--calls 2000] [--batches 40]

A group of one rank, tiny tensors, CPU. Both run the same call; the minimum over many batches is compared.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist

from ub_overlap.runtime import ops

TABLES = {
    "one strategy": "pipelined",
    "table of 2": "64=none;*=pipelined",
    "table of 12": ";".join(f"{n}=pipelined:chunks=1" for n in range(1, 12)) + ";*=pipelined",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--batches", type=int, default=40)
    args = parser.parse_args()
    ops.load()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    shard, weight = torch.zeros(128, 4), torch.zeros(4, 4)
    best = dict.fromkeys(TABLES, float("inf"))
    for _ in range(args.batches):
        for name, strategy in TABLES.items():
            begin = time.perf_counter()
            for _ in range(args.calls):
                torch.ops.ub_overlap.all_gather_matmul(
                    shard, [weight], [False], [False], 1, False, False, [], [], strategy, group.group_name, "/pick"
                )
            best[name] = min(best[name], (time.perf_counter() - begin) / args.calls)
    for name, seconds in best.items():
        print(f"{name}: {seconds * 1e6:.2f} us per call, {(seconds - best['one strategy']) * 1e6:+.2f} us")


if __name__ == "__main__":
    main()
