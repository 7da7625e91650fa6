"""Flags of these benchmarks."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ub_overlap.cli.parsers import non_negative_int


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Add --ours, --compiler, --iters, --warm, --forward, --steady, --clocks, --budget-s, --deadline-s, --device and --json."""
    parser.add_argument("--ours", action="append", default=[], metavar="NAME=JSON", help="one of ours with these options")
    parser.add_argument("--compiler", choices=("inductor", "aot_eager"), help="default: inductor on CUDA, aot_eager on the CPU")
    parser.add_argument("--iters", type=int, default=15)
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument("--forward", action="store_true", help="time the forward without gradients too; it compiles again")
    parser.add_argument(
        "--steady", type=non_negative_int, default=0, metavar="N",
        help="time N steps in a row too, behind one that does not count: the host is ahead of the GPU, as in training",
    )  # fmt: skip
    parser.add_argument("--clocks", action="store_true", help="sample clock and power of the GPU during each step")
    parser.add_argument("--budget-s", type=float, default=0.0, help="build nothing new after this many seconds (0: no limit)")
    parser.add_argument("--deadline-s", type=float, default=240.0, help="time limit of a compilation or a round")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--json")


def add_graph_flags(parser: argparse.ArgumentParser) -> None:
    """Add --graphs and --waterfall."""
    parser.add_argument("--graphs", action="store_true", help="time each as a CUDA graph too, last")
    parser.add_argument(
        "--waterfall", nargs="?", choices=("captured", "eager"), const="captured",
        help="take the steps apart, last: captured ones (default; implies --graphs), or eager ones",
    )  # fmt: skip


def options_of(ours: list[str], default: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the options of ours by name, from the values of --ours; `default` without any."""
    named = [text.partition("=") for text in ours]
    return {name: json.loads(options or "{}") for name, _, options in named} or default
