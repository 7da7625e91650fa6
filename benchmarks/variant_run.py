"""A run that compiles variants of one model, compares them, times them together, and takes captured steps apart."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from ub_overlap.runtime.session.bind import arena_bytes
from ub_overlap.tools.rank_process import Deadline, World, capture_graph

from . import facts, waterfall
from .replay_trace import trace_eager_steps, trace_replays
from .timing import Clock

V = TypeVar("V", bound=Any)


class VariantRun:
    """One run over all sizes. `document` is written after every change.

    `args`: with `json`, `deadline_s`, `budget_s`, `iters` and `warm`. `text`: the document as text.
    """

    def __init__(
        self, args: argparse.Namespace, world: World, document: dict[str, Any], text: Callable[[dict[str, Any]], str]
    ) -> None:
        self.args, self.world, self.document, self._text = args, world, document, text
        self.begun, self.clock = time.monotonic(), Clock(world)

    def save(self) -> None:
        if self.world.rank == 0 and self.args.json:
            facts.write(self.args.json, self.document)

    def deadline(self, name: str) -> Deadline:
        return Deadline(name, self.args.deadline_s, lambda: self.world.say(self._text(self.document)))

    def is_spent(self) -> bool:
        return bool(self.args.budget_s) and self.world.worst([time.monotonic() - self.begun])[0] > self.args.budget_s

    def compile(self, name: str, make: Callable[[], V], variants: dict[str, V], rows: dict[str, Any]) -> None:
        """Add the variant that `make` returns, or why there is none. Measure the peak memory of its step.

        Landing memory is counted apart, after the variant: it is shared by all variants of the run.
        """
        world, begun = self.world, time.monotonic()
        with self.deadline(f"compile {name}"):
            variant, why = world.agreed(make)
            if why:
                rows[name]["why"]["*"] = why
                world.say(f"{name}: {why}")
                return
            variant.step()
            if world.cuda:
                world.sync()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                variant.step()
                world.sync()
                mib = (torch.cuda.max_memory_allocated() - before) / 2**20
                rows[name]["peak_mib"] = world.worst([mib])[0]
                rows[name]["arena_mib"] = world.worst([arena_bytes() / 2**20])[0]
        variants[name] = variant
        rows[name] |= {"sites": variant.sites, "compile_s": time.monotonic() - begun}
        world.say(f"{name}: compiled in {rows[name]['compile_s']:.1f} s {variant.sites}")

    def remove_wrong(
        self,
        name: str,
        errors: Mapping[str, float] | None,
        why: str,
        bound: float,
        variants: dict[str, V],
        rows: dict[str, Any],
    ) -> str:
        """Remove a variant that cannot be compared, or differs from another by more than `bound`. Return the worst tensor."""
        errors = errors or {}
        worst = max(errors, key=errors.__getitem__, default="")
        if not why and not errors[worst] <= bound:
            why = f"wrong numbers: {worst} differs from the reference by {errors[worst]:.3g} of its norm"
        rows[name]["error"] = errors.get(worst)
        if why:
            rows[name]["why"]["*"] = why
            self.world.say(f"{name}: {why}")
            del variants[name]
        return worst

    def rounds(self, calls: Mapping[str, Callable[[], Any]], rows: dict[str, Any], suffix: str = "") -> None:
        """Time all calls ("VARIANT KIND"), alternating, into rows[VARIANT][KIND + suffix]."""
        with self.deadline("times"):
            timed, why = self.world.agreed(lambda: self.clock.rounds(calls, self.args.iters, self.args.warm))
        ms, iqr = timed or ({}, {})
        for call in calls:
            name, _, kind = call.rpartition(" ")
            if call in ms:
                rows[name] |= {kind + suffix: ms[call], f"{kind}{suffix}_iqr": iqr[call]}
            else:
                rows[name]["why"][kind + suffix] = why
        self.save()

    def capture(self, calls: Mapping[str, Callable[[], Any]], rows: dict[str, Any]) -> dict[str, Callable[[], Any]]:
        """Time all calls as CUDA graphs, last: a failed capture may break the process. Return the replays."""
        replays: dict[str, Callable[[], Any]] = {}
        for call, body in calls.items():
            name, _, kind = call.rpartition(" ")
            if not self.world.cuda:
                rows[name]["why"][f"{kind}_g"] = "needs CUDA"
                continue
            with self.deadline(f"capture {call}"):
                made, why = self.world.agreed(lambda b=body: capture_graph(b, self.world))
            if why:
                rows[name]["why"][f"{kind}_g"] = why
                self.world.say(f"{call}: no graph: {why}")
            else:
                replays[call] = made[0]
        self.rounds(replays, rows, "_g")
        return replays

    def waterfall(self, calls: Mapping[str, Any], row: dict[str, Any], is_eager: bool = False) -> None:
        """Take the step of each variant apart, on the rank whose "compute" takes longest.

        `calls`: "VARIANT step": replays of captured steps, or eager steps.
        """
        steps: dict[str, Any] = {}
        trace, measure_all, kind = (
            (trace_eager_steps, waterfall.measure_marked_steps, "step") if is_eager
            else (trace_replays, waterfall.measure_steps, "step_g")
        )  # fmt: skip
        for name, variant in row["variants"].items():
            if f"{name} step" not in calls:
                variant["why"]["waterfall"] = variant["why"].get("step_g", "no captured step")
                continue

            def measure(call: Any = calls[f"{name} step"]) -> waterfall.StepTimes:
                return waterfall.middle_step(measure_all(trace(call, self.clock.together, self.world)))

            with self.deadline(f"trace of {name}"):
                steps[name], why = self.world.agreed(measure)
            if why:
                del steps[name]
                variant["why"]["waterfall"] = why
                self.world.say(f"{name}: no waterfall: {why}")
        if steps:
            measured = {n: row["variants"][n][kind] for n in steps if row["variants"][n].get(kind)}
            ranks = self.world.gather(steps)
            base = "compute" if "compute" in steps else next(iter(steps))
            slowest = max(range(len(ranks)), key=lambda rank: ranks[rank][base].total_us)
            row["waterfall"] = waterfall.compare(ranks[slowest], measured) | {"rank": slowest, "is_eager": is_eager}
            row["waterfall"]["ranks"] = waterfall.by_rank(ranks)
        self.save()
