"""`plan`: predict the step of a tensor-, data-, context-, pipeline- or expert-parallel block, on a machine without a GPU."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ub_overlap.runtime.errors import OptionError

from .exports import report_written
from .parsers import Parser, add_verb, non_negative, non_negative_int, output_file
from .progress import show_progress
from .report_path import plan_file

if TYPE_CHECKING:
    from ub_overlap.tools.planner.planned_context import PlannedContext
    from ub_overlap.tools.planner.planned_pipeline import PlannedPipeline
    from ub_overlap.tools.planner.planned_step import PlannedStep
    from ub_overlap.tools.planner.sizes import PlannedBlock

SIZES = {
    "hidden": "width of the model", "ffn": "width of the feed-forward layer", "heads": "query heads",
    "kv_heads": "key/value heads (default: heads)", "seq": "tokens of a sequence, over all ranks", "tp": "ranks",
    "batch": "sequences (default 1)", "layers": "blocks, one after the other; with --pp of a stage (default 1)",
    "dp": "ranks that shard each weight, with sequences of their own (ZeRO-3; default 1)",
    "cp": "ranks that share each sequence (default 1): also compares the forms of exchange",
    "ranks_per_host": "ranks of one host (default 8); others are reached over the network",
    "pp": "ranks of a pipeline (default 1): also predicts its step with every schedule of torch that fits",
    "virtual": "stages of each rank of the pipeline (default 1)", "microbatches": "of a step of the pipeline",
    "experts": "experts of a layer, of width ffn (default 1: a dense layer)", "experts_per_token": "of these (default 1)",
    "shared_ffn": "width of a dense layer next to the experts (default 0: none)",
    "ep": "ranks of tp * dp that share the experts, and exchange tokens (default 1)",
}  # fmt: skip
REQUIRED = ("hidden", "ffn", "heads", "seq", "tp")


def add(verbs: Any, as_json: argparse.ArgumentParser) -> None:
    parser = add_verb(
        verbs, "plan",
        "predict the step of a tensor-, data-, context-, pipeline- or expert-parallel block, site by site; needs no GPU",
        parents=[as_json],
        examples=[
            "plan --model llama-70b",
            "plan --model llama-8b --seq 4096 --tp 4 --save plan.json --html page.html",
            "plan --model llama-8b --tp 1 --dp 64 --layers 2 --memory-budget 0",
            "plan --model llama-70b --seq 131072 --tp 4 --cp 2",
            "plan --model llama-8b --tp 8 --pp 4 --virtual 2 --layers 4 --microbatches 16 --html page.html",
            "plan --model mixtral-8x7b --layers 2",
            "plan --hidden 8192 --ffn 28672 --heads 64 --kv-heads 8 --seq 8192 --tp 8",
        ],
        exits={0: "success", 1: "the block could not be planned", 2: "bad usage, or sizes that do not fit"},
    )  # fmt: skip
    parser.add_argument("--model", help="llama-8b, llama-70b, gpt3-175b or mixtral-8x7b; other size flags replace its values")
    for name, text in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=text)
    parser.add_argument(
        "--cp-form",
        metavar="FORM",
        help="gathered, ring, ring_all_to_all or ulysses (default: all, and the sites of the fastest)",
    )
    parser.add_argument("--dtype", help="bf16 (default), fp16 or fp32")
    parser.add_argument("--ungated", action="store_true", help="GELU, LayerNorm and biases (GPT) instead of SwiGLU and RMSNorm")
    parser.add_argument("--profile", default="h200", help="a shipped profile (h200, h100, cpu) or a file (default: h200)")
    parser.add_argument("--min-bytes", type=non_negative_int, metavar="N", help="the option min_bytes=")
    parser.add_argument(
        "--split-tokens",
        choices=("auto", "force", "off"),
        help="the option split_tokens=: experts in two halves of their tokens (default auto: where the step is faster)",
    )
    parser.add_argument(
        "--memory-budget", type=non_negative, metavar="N", help="the option memory_budget=: a share up to 1, or bytes"
    )
    parser.add_argument(
        "--overrides",
        type=plan_file,
        metavar="FILE",
        help="the option overrides=: JSON or YAML with strategies, a saved plan, or the digest of a stored one",
    )
    parser.add_argument(
        "--save", type=output_file, metavar="FILE", help="write the plan; options={'overrides': FILE} applies it"
    )
    parser.add_argument(
        "--timeline",
        type=output_file,
        metavar="FILE",
        help="write the predicted steps of all sites: JSON for Perfetto, or .png (needs matplotlib)",
    )
    parser.add_argument(
        "--html", type=output_file, metavar="FILE", help="write a page: both graphs side by side, sites, predicted schedules"
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.set_defaults(run=lambda flags: run(flags, parser))


def run(flags: argparse.Namespace, parser: Parser) -> int:
    """Print the step and return 0. UsageError for missing sizes, OptionError for invalid values."""
    sizes, options = check(flags, parser)
    with show_progress("plan", quiet=flags.quiet or flags.json) as progress:
        progress("loading torch")
        from ub_overlap.compiler.options import parse
        from ub_overlap.tools.planner.sizes import CP_FORMS

        forms = (flags.cp_form,) if flags.cp_form else CP_FORMS
        step = _plan(sizes, parse(options, frozenset())[0], forms, graphs=flags.html is not None, progress=progress)
        progress("writing files")
        if flags.save:
            flags.save.write_text(step.saved_plan(), encoding="utf-8")
        if flags.html:
            step.to_html(flags.html)
        if flags.timeline:
            step.timeline(flags.timeline)
    for path in filter(None, (flags.save, flags.html, flags.timeline)):
        report_written(path)
    if flags.json:
        print(step.to_json())
    else:
        from ub_overlap.compiler.text.terminal import output_width

        print(step.text(output_width()))
    return 0


def _plan(
    sizes: PlannedBlock, options: Any, forms: Sequence[str], graphs: bool, progress: Callable[[str], None]
) -> PlannedStep | PlannedPipeline | PlannedContext:
    """Plan the block; a stage of a pipeline in the fastest of `forms`."""
    if sizes.cp > 1 and (sizes.pp == 1 or len(forms) > 1):
        from ub_overlap.tools.planner.planned_context import plan_context

        planned = plan_context(sizes, options, graphs and sizes.pp == 1, progress, forms)
        if sizes.pp == 1:
            return planned
        sizes = planned.fastest.sizes
    if sizes.pp > 1:
        from ub_overlap.tools.planner.planned_pipeline import plan_pipeline

        return plan_pipeline(sizes, options, graphs, progress)
    from ub_overlap.tools.planner.planned_step import plan_step

    return plan_step(sizes, options, graphs, progress)


def check(flags: argparse.Namespace, parser: Parser) -> tuple[PlannedBlock, dict[str, Any]]:
    """Return the sizes and options of the flags. It checks all values, and imports no torch: errors take no time."""
    from ub_overlap.compiler.cost import profile_lookup
    from ub_overlap.compiler.overrides.override_set import parse_overrides
    from ub_overlap.tools.planner.sizes import PlannedBlock, named

    size_flags: dict[str, Any] = {
        name: value for name in (*SIZES, "cp_form", "dtype") if (value := getattr(flags, name)) is not None
    }
    if flags.ungated:
        size_flags["gated"] = False
    if flags.cp_form and size_flags.get("cp", 1) == 1:
        parser.error("--cp-form needs --cp")
    if size_flags.get("pp", 1) > 1 and "microbatches" not in size_flags:
        parser.error("--pp needs --microbatches")
    if {"dp", "cp", "pp"} & size_flags.keys() and not flags.model:
        size_flags.setdefault("tp", 1)
    missing = [f"--{name}" for name in REQUIRED if name not in size_flags]
    if not flags.model and missing:
        parser.error(f"give --model, or {', '.join(missing)}")
    if not flags.model:
        size_flags.setdefault("kv_heads", size_flags["heads"])
    sizes = named(flags.model, **size_flags) if flags.model else PlannedBlock(**size_flags)
    options: dict[str, Any] = {"profile": flags.profile}
    option_flags = ("overrides", "min_bytes", "memory_budget", "split_tokens")
    options |= {name: value for name in option_flags if (value := getattr(flags, name)) is not None}
    profile_lookup.load(flags.profile, sizes.tp)
    if flags.overrides:
        options["overrides"] = str(flags.overrides)
        parse_overrides(options["overrides"])
    if flags.timeline and flags.timeline.suffix.lower() == ".png":
        _require("matplotlib", "--timeline FILE.png", "pip install matplotlib, or write JSON: --timeline step.json")
    if flags.html:
        _require("ub_overlap._C", "--html", "build the extension: pip install --no-build-isolation .")
    _require("torch", "plan", "pip install torch; what works here: python -m ub_overlap doctor")
    return sizes, options


def _require(module: str, what: str, fix: str) -> None:
    """Raise OptionError if a module is not installed. It is not imported."""
    if importlib.util.find_spec(module) is None:
        raise OptionError(f"{what} needs {module}, which is not installed", fix=fix)
