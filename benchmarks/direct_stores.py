"""Time matmuls that store their product at its owners (strategy direct) in groups of R ranks, in mirror mode on two GPUs.

    torchrun --nproc-per-node 2 -m benchmarks.direct_stores [--ranks 4,8] [--profile FILE]

`calibrate` measures the groups of the machine that it runs on. These are rows of the same kind for larger groups. --profile
replaces the rows of these group sizes in the field "direct" of a profile.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ub_overlap.tools.calibrate import direct_stores, kernels
from ub_overlap.tools.calibrate.world import Burst
from ub_overlap.tools.rank_process import Deadline

from .mirror import PROCESSES
from .mirror.group import MirrorGroups
from .ops.peers import PeerPushes
from .ranks import begin, end


def merge(profile: dict[str, Any], measured: list[dict[str, Any]], source: str) -> dict[str, Any]:
    """Return `profile` with the rows of `measured` in place of its rows of the same group sizes."""
    sizes = {row[1] for field in measured for row in field["matmuls"]}
    old = profile.get("direct") or {"link_gbs": 0.0, "matmuls": []}
    rows = [row for row in old["matmuls"] if row[1] not in sizes] + [row for field in measured for row in field["matmuls"]]
    rate = max(old["link_gbs"], *(field["link_gbs"] for field in measured))
    direct = {"link_gbs": rate, "matmuls": sorted(rows, key=lambda row: row[:5])}
    return {**profile, "source": f"{profile['source']}; direct: {source}", "direct": direct}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="4,8", help="comma-separated sizes of groups, each above 2")
    parser.add_argument("--profile", help="a profile to write the rows to")
    parser.add_argument("--quick", action="store_true", help="a quarter of the shapes")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    args = parser.parse_args()
    world = begin("direct_stores", args.device, step_timeout_s=20, init_timeout_s=60, ranks=PROCESSES)
    peers = PeerPushes(world, PROCESSES, 1 << 20) if world.cuda else None
    burst = Burst(world, peers.together if peers else None)
    burst.settle(0.2)
    measured = []
    for ranks in (int(text) for text in args.ranks.split(",")):
        with Deadline(f"{ranks} ranks", 120):
            groups = MirrorGroups(world, ranks)
            calls = kernels.Calls(world, groups.new_group(), ranks)
            kernel_us = kernels.small_kernel(world, burst)
            measured.append(direct_stores.measure(world, burst, calls, kernel_us, lambda *_: None, args.quick))
            groups.close()
    if world.rank == 0:
        for field in measured:
            print(json.dumps(field), flush=True)
        if args.profile:
            path = Path(args.profile)
            command = f"benchmarks.direct_stores --ranks {args.ranks}, in mirror mode"
            path.write_text(json.dumps(merge(json.loads(path.read_text()), measured, command)) + "\n")
    end(world, 0)


if __name__ == "__main__":
    main()
