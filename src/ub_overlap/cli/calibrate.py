"""`calibrate`: measure this machine for the cost model, under torchrun."""

from __future__ import annotations

import argparse
import os
from typing import Any


def add(verbs: Any, as_json: argparse.ArgumentParser) -> None:
    parser = verbs.add_parser("calibrate", help="measure this machine for the cost model (under torchrun)")
    parser.add_argument("--out", help="write the profile to this file instead of the user's cache")
    parser.add_argument("--quick", action="store_true", help="measure a quarter of the points")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if available")
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    """Measure this machine and store a profile. UbOverlapError if that is not possible."""
    # NVLink multicast is never used. torch reads these variables when it is imported.
    for name, value in (("NCCL_NVLS_ENABLE", "0"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"), ("NVSHMEM_DISABLE_NVLS", "1")):
        os.environ[name] = value
    from ub_overlap.tools.calibrate.calibrate import calibrate

    calibrate(flags.out, flags.device, quick=flags.quick)
    return 0
