"""`calibrate`: measure this machine for the cost model, under torchrun."""

from __future__ import annotations

import argparse
import os
from typing import Any

from .parsers import add_verb, output_file


def add(verbs: Any, as_json: argparse.ArgumentParser) -> None:
    parser = add_verb(
        verbs, "calibrate", "measure this machine for the cost model, under torchrun",
        launcher="torchrun --nproc-per-node 8 -m ub_overlap", examples=["calibrate", "calibrate --quick --out profile.json"],
        exits={
            0: "the profile is usable", 1: "it is not, or a measurement failed on all ranks",
            2: "bad usage, or not started by torchrun",
        },
    )  # fmt: skip
    parser.add_argument(
        "--out", type=output_file, metavar="FILE", help="write the profile to this file instead of the user's cache"
    )
    parser.add_argument("--quick", action="store_true", help="measure a quarter of the points")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if available")
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    """Measure this machine and store a profile. Return 1 if it is not usable. UbOverlapError if that is not possible."""
    from ub_overlap.tools.calibrate.launch import ranks_of_torchrun

    ranks_of_torchrun()  # before torch is loaded
    # NVLink multicast is never used. torch reads these variables when it is imported.
    for name, value in (("NCCL_NVLS_ENABLE", "0"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"), ("NVSHMEM_DISABLE_NVLS", "1")):
        os.environ[name] = value
    from ub_overlap.tools.calibrate.calibrate import calibrate

    return 0 if calibrate(flags.out and str(flags.out), flags.device, quick=flags.quick) else 1
