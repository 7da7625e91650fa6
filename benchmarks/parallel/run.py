"""The run of one of these benchmarks: compile, compare and time the variants of each row."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ub_overlap.tools.rank_process import Deadline, World

from .. import facts, gpu_clock
from ..bounds import GRADIENT
from ..ranks import begin, end
from ..replay_trace import prepare_for_captures
from ..timing import Prepared
from ..variant_run import VariantRun
from .variant import ParallelVariant, differences


class ParallelRun(VariantRun):
    """One run over all rows."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model."""
        return torch.bfloat16 if self.world.cuda else torch.float32

    @property
    def compiler(self) -> str:
        return self.args.compiler or ("inductor" if self.world.cuda else "aot_eager")

    def add_row(self, **row: Any) -> dict[str, Any]:
        """Add a row of the document for all variants of the run. Return it."""
        row |= {"compiler": self.compiler, "variants": {name: {"why": {}} for name in self.args.variants}}
        self.document["rows"].append(row)
        return row

    def compile_all(self, row: dict[str, Any], make: Callable[[str], ParallelVariant]) -> dict[str, ParallelVariant]:
        """Return the variants that compile within the time budget."""
        torch._dynamo.reset()
        variants: dict[str, ParallelVariant] = {}
        for name in self.args.variants:
            if self.is_spent():
                row["variants"][name]["why"]["*"] = f"--budget-s {self.args.budget_s:g} is spent"
            else:
                self.compile(name, lambda name=name: make(name), variants, row["variants"])
                for field in ("settings", "predicted"):
                    if name in variants and (value := getattr(variants[name], field)):
                        row["variants"][name][field] = dict(value)
        return variants

    def compare_with(
        self, reference: str, names: Iterable[str], variants: dict[str, ParallelVariant], row: dict[str, Any]
    ) -> None:
        """Compare all results of variants with those of `reference`. Variants with wrong numbers are removed."""
        true = variants[reference]
        for name in names:
            with self.deadline(f"compare {name}"):
                errors, why = self.world.agreed(lambda name=name: differences(variants[name], true, self.world))
                rows = row["variants"]
                rows[name]["worst"] = self.remove_wrong(name, errors, why, GRADIENT[self.dtype], variants, rows)

    def time_all(self, variants: dict[str, ParallelVariant], row: dict[str, Any]) -> None:
        """Time the steps of all variants, their forwards with --forward, and steps in a row with --steady."""
        for kind in ("step", "forward") if self.args.forward else ("step",):
            calls = {name: getattr(v, kind) for name, v in variants.items() if kind == "step" or v.has_forward}
            self.rounds({f"{name} {kind}": call for name, call in calls.items()}, row["variants"])
        if count := self.args.steady:
            in_a_row = {f"{name} step": Prepared(v.step, v.step, count) for name, v in variants.items()}
            self.rounds(in_a_row, row["variants"], "_s")

    def take_apart(
        self, variants: dict[str, ParallelVariant], row: dict[str, Any], uncaptured: Mapping[str, str] | None = None
    ) -> None:
        """Time captured steps, and take steps apart, as --graphs and --waterfall say.

        `uncaptured`: why a variant is not captured, by name.
        """
        args, steps = self.args, {f"{name} step": v.step for name, v in variants.items()}
        repeated: Mapping[str, Callable[[], Any]] = steps
        if args.graphs or args.waterfall == "captured":
            captured = dict(steps)
            for name, why in (uncaptured or {}).items():
                row["variants"][name]["why"]["step_g"] = why
                del captured[f"{name} step"]
            replays = self.capture(captured, row["variants"])
            repeated = {**steps, **replays}
            if args.waterfall == "captured":
                self.waterfall(replays, row)
        if args.waterfall == "eager" and self.world.cuda:
            self.waterfall(steps, row, is_eager=True)
        if args.clocks and self.world.cuda:
            self.clocks(repeated, row)

    def clocks(self, calls: Mapping[str, Callable[[], Any]], row: dict[str, Any]) -> None:
        """Sample clock and power of each variant, on the rank with the lowest clock. `calls`: "VARIANT step"."""
        for call, body in calls.items():
            variant = row["variants"][call.rpartition(" ")[0]]
            if not (ms := variant.get("step_g") or variant.get("step")):
                continue
            count = math.ceil(1e3 * gpu_clock.SECONDS / ms)  # equal on all ranks
            with self.deadline(f"clocks of {call}"):
                sampled, why = self.world.agreed(lambda body=body, count=count: gpu_clock.sample(body, count))
            if why:
                variant["why"]["clocks"] = why
            else:
                variant |= min(self.world.gather(sampled), key=lambda rank: rank["sm_mhz"])
        self.save()


def run_benchmark(
    name: str,
    args: argparse.Namespace,
    kind: type[ParallelRun],
    measure: Callable[[Any], None],
    text: Callable[[dict[str, Any]], str],
    prepare: Callable[[World], None] = lambda world: None,
    **entries: Any,
) -> None:
    """Run a benchmark under torchrun and leave: `measure` adds its rows. Exit code 1 for wrong numbers, or outside torchrun.

    `prepare` runs before the facts are collected. `entries`: further entries of the document.
    """
    world = begin(name, args.device, step_timeout_s=60, init_timeout_s=240)  # ranks compile for different times
    prepare(world)
    if args.waterfall and world.cuda:
        prepare_for_captures()
    with Deadline("set-up", 120):
        document: dict[str, Any] = {"benchmark": name, **facts.facts(world, f"benchmarks.{name}")}
        document |= {"iters": args.iters, "ours": args.options, **entries, "rows": []}
        run = kind(args, world, document, text)
    measure(run)
    if world.rank == 0:
        print(text(document), flush=True)
    reasons = [why for row in document["rows"] for v in row["variants"].values() for why in v["why"].values()]
    end(world, 1 if any("wrong numbers" in why for why in reasons) else 0)
