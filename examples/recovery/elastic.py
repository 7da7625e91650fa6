"""Elastic restart: a rank is killed, torchrun restarts all ranks, and they go on from the checkpoint.

torchrun --nproc-per-node 2 --max-restarts 1 examples/recovery/elastic.py --folder CHECKPOINTS
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from shrink import train


def main() -> None:
    """Train; the last rank dies in step 3 of the first start."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=5)
    flags = parser.parse_args()
    flags.folder.mkdir(parents=True, exist_ok=True)
    # Restarts share the Store of torchrun, which holds the addresses of the killed start. So each start has its own prefix.
    # Each node counts its own failures only: several nodes need another prefix (docs/guide/recovery.md).
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    store, rank, ranks = next(dist.rendezvous("env://", timeout=timedelta(seconds=60)))
    store = dist.PrefixStore(f"start-{start}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    losses = train(rank, ranks, flags.steps, flags.folder, 3 if start == 0 and rank == ranks - 1 else -1)
    if rank == 0:
        print(f"start {start}: done {losses}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
