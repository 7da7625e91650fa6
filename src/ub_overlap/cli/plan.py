"""`plan`: predict the step of a tensor-parallel block, on a machine without a GPU."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

SIZES = {
    "hidden": "width of the model", "ffn": "width of the feed-forward layer", "heads": "query heads",
    "kv_heads": "key/value heads (default: heads)", "seq": "tokens of a sequence, over all ranks", "tp": "ranks",
    "batch": "sequences (default 1)", "layers": "blocks, one after the other (default 1)",
}  # fmt: skip
REQUIRED = ("hidden", "ffn", "heads", "seq", "tp")


def add(verbs: Any, as_json: argparse.ArgumentParser) -> None:
    parser = verbs.add_parser("plan", parents=[as_json], help="predict the step of a block, site by site; needs no GPU")
    parser.add_argument("--model", help="llama-8b, llama-70b or gpt3-175b; other size flags replace its values")
    for name, text in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=text)
    parser.add_argument("--dtype", help="bf16 (default), fp16 or fp32")
    parser.add_argument("--ungated", action="store_true", help="GELU, LayerNorm and biases (GPT) instead of SwiGLU and RMSNorm")
    parser.add_argument("--profile", default="h200", help="a shipped profile (h200, cpu) or a file (default: h200)")
    parser.add_argument("--min-bytes", type=int, metavar="N", help="the option min_bytes=")
    parser.add_argument("--memory-budget", type=float, metavar="N", help="the option memory_budget=: a share up to 1, or bytes")
    parser.add_argument(
        "--overrides", metavar="FILE", help="the option overrides=: JSON or YAML with strategies, or a saved plan"
    )
    parser.add_argument("--save", metavar="FILE", help="write the plan; options={'overrides': FILE} applies it")
    parser.add_argument("--timeline", metavar="FILE", help="write the predicted steps of all sites: JSON for Perfetto, or .png")
    parser.add_argument("--html", metavar="FILE", help="write a page: both graphs side by side, sites, predicted schedules")
    parser.set_defaults(run=lambda flags: run(flags, parser))


def run(flags: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print the step and return 0. SystemExit(2) for missing sizes, OptionError for invalid ones."""
    size_flags: dict[str, Any] = {name: value for name in (*SIZES, "dtype") if (value := getattr(flags, name)) is not None}
    if flags.ungated:
        size_flags["gated"] = False
    missing = [f"--{name}" for name in REQUIRED if name not in size_flags]
    if not flags.model and missing:
        parser.error(f"give --model, or {', '.join(missing)}")
    from ub_overlap.compiler.options import parse
    from ub_overlap.tools.planner.models import PlannedBlock, named
    from ub_overlap.tools.planner.planned_step import plan_step

    if not flags.model:
        size_flags.setdefault("kv_heads", size_flags["heads"])
    sizes = named(flags.model, **size_flags) if flags.model else PlannedBlock(**size_flags)
    options: dict[str, Any] = {"profile": flags.profile}
    option_flags = ("overrides", "min_bytes", "memory_budget")
    options |= {name: value for name in option_flags if (value := getattr(flags, name)) is not None}
    step = plan_step(sizes, parse(options, frozenset())[0], graphs=flags.html is not None)
    if flags.save:
        Path(flags.save).write_text(step.saved_plan())
    if flags.html:
        step.to_html(flags.html)
    if flags.timeline:
        step.timeline(flags.timeline)
    print(step.to_json() if flags.json else step)
    return 0
