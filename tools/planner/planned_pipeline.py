"""Predict the step of a pipeline by schedule: bubble, exposed messages and memory, next to the step of one stage."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ub_overlap.compiler.cost.curve import at
from ub_overlap.compiler.cost.network import Network
from ub_overlap.compiler.cost.profile import Profile
from ub_overlap.compiler.options import Options
from ub_overlap.compiler.text.table import render_table
from ub_overlap.runtime.errors import OptionError
from ub_overlap.runtime.session.channels import PIECE_BYTES

from .pipeline_figure import draw
from .pipeline_orders import SCHEDULES, SPLIT_BACKWARD, fits, pipeline_order
from .pipeline_run import PipelineRun, StageTimes, play
from .planned_step import PlannedStep, plan_step
from .sizes import PlannedBlock

_ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True)
class PlannedSchedule:
    """The predicted step with one schedule. `sends_first`: with ub_overlap.pipeline.Stage."""

    schedule: str
    sends_first: bool
    run: PipelineRun
    without_messages: PipelineRun

    @property
    def exposed_us(self) -> float:
        """The time that messages add to the step."""
        return self.run.us - self.without_messages.us

    @property
    def sends(self) -> str:
        """When a gradient is sent."""
        return "before W" if self.sends_first else "after B"

    def to_dict(self) -> dict[str, Any]:
        return {
            "schedule": self.schedule, "sends": self.sends, "us": self.run.us, "bubble": self.run.bubble,
            "exposed_us": self.exposed_us, "in_flight": self.run.in_flight,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class PlannedPipeline:
    """A pipeline's step. `stage`: one microbatch in one stage, as plan_step predicts it."""

    stage: PlannedStep
    times: StageTimes
    message_bytes: int
    message_us: tuple[float, ...]
    """From each rank to the next; the last one to the first."""
    schedules: tuple[PlannedSchedule, ...]
    """The fastest first."""

    def saved_plan(self) -> str:
        """Return JSON for options={"overrides": path}, as PlannedStep."""
        return self.stage.saved_plan()

    def timeline(self, path: str | Path) -> Path:
        """Write the predicted steps of the stage's sites, as PlannedStep."""
        return self.stage.timeline(path)

    def to_html(self, path: str | Path) -> Path:
        """Write the page of the stage, with the fastest schedules above its graphs."""
        return self.stage.to_html(path, draw([(_title(s), s.run) for s in self.schedules]))

    def to_json(self) -> str:
        """Return the prediction as JSON: that of the stage, and "pipeline"."""
        t = self.times
        pipeline = {
            "stage_us": {"F": t.forward_us, "B": t.backward_us, "I": t.input_us, "W": t.weight_us},
            "message_bytes": self.message_bytes,
            "message_us": list(self.message_us),
            "schedules": [s.to_dict() for s in self.schedules],
        }
        return json.dumps({**json.loads(self.stage.to_json()), "pipeline": pipeline}, indent=1)

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """Return the prediction as text. `width`: of its tables."""
        s, t = self.stage.sizes, self.times
        rows = [
            {
                "schedule": p.schedule,
                "gradient sent": p.sends,
                "step ms": f"{p.run.us / 1e3:.2f}",
                "bubble": f"{p.run.bubble:.1%}",
                "exposed messages ms": f"{p.exposed_us / 1e3:.2f}",
                "in flight": p.run.in_flight,
            }
            for p in self.schedules
        ]
        messages = ", ".join(f"{us:.0f}" for us in dict.fromkeys(self.message_us))
        return (
            f"{self.stage.text(width)}\n\n"
            f"pipeline of {s.pp} ranks x {s.virtual} stages of {s.layers} layers, {s.microbatches} microbatches\n"
            f"a microbatch in a stage: forward {t.forward_us / 1e3:.2f} ms, backward {t.backward_us / 1e3:.2f} ms, in two "
            f"parts {t.input_us / 1e3:.2f} + {t.weight_us / 1e3:.2f} ms; message {self.message_bytes / 1e6:.1f} MB, "
            f"{messages} us\n\n"
            f"{render_table(rows, width=width)}\n{LEGEND}"
        )


LEGEND = (
    "after B: PipelineStage; before W: ub_overlap.pipeline.Stage; in flight: microbatches of stages whose activations a rank "
    "holds"
)


def _title(planned: PlannedSchedule) -> str:
    return f"{planned.schedule}, gradient sent {planned.sends}: {planned.run.us / 1e3:.2f} ms, bubble {planned.run.bubble:.1%}"


def plan_pipeline(
    sizes: PlannedBlock, options: Options, graphs: bool = False, progress: Callable[[str], None] = lambda _: None
) -> PlannedPipeline:
    """Plan a stage with the backward in one and in two parts, and play every schedule that fits. Arguments as of plan_step."""
    stage = plan_step(sizes, options, graphs, progress)
    cut = plan_step(sizes, replace(options, defer_weight_gradients=True), False, progress)
    times = StageTimes(*stage.graph_us, *cut.graph_us[1:])
    size = sizes.batch * sizes.seq // (sizes.cp * sizes.tp) * sizes.hidden * _ELEMENT_BYTES[sizes.dtype]
    progress("playing the schedules")
    profile = stage.profile

    def link_us(source: int, destination: int) -> float:
        is_near = sizes.host_of_stage(source) == sizes.host_of_stage(destination)
        return message_us(profile, size, None if is_near else profile.network)

    schedules = plan_schedules(sizes, times, link_us)
    links = tuple(link_us(r, (r + 1) % sizes.pp) for r in range(sizes.pp))
    return PlannedPipeline(stage, times, size, links, schedules)


def plan_schedules(sizes: PlannedBlock, times: StageTimes, link_us: Callable[[int, int], float]) -> tuple[PlannedSchedule, ...]:
    """Return the steps of all schedules that fit, the fastest first. OptionError if torch accepts none."""
    found: list[PlannedSchedule] = []
    refused: list[str] = []
    for name in SCHEDULES:
        if not fits(name, sizes.virtual):
            continue
        try:
            order = pipeline_order(name, sizes.pp, sizes.virtual, sizes.microbatches)
        except OptionError as error:
            refused.append(str(error))
            continue
        for sends_first in (True,) if name in SPLIT_BACKWARD else (False, True):
            runs = [play(order, times, us, sends_first) for us in (link_us, lambda *_: 0.0)]
            found.append(PlannedSchedule(name, sends_first, *runs))
    if not found:
        raise OptionError("no schedule fits the pipeline", where="--pp, --virtual, --microbatches", got="; ".join(refused))
    return tuple(sorted(found, key=lambda s: s.run.us))


def message_us(profile: Profile, size: int, network: Network | None) -> float:
    """Return the microseconds from the end of a stage's work to the arrival of its message at another rank.

    Within a host the last piece is copied out of its slot after its arrival. `network`: between hosts.
    """
    steps = profile.steps
    if network is not None:
        return network.base_us + network.hop_us + size / (network.gbs * 1e3)
    return at(profile.push, size) + steps.flag_us + steps.arrive_us + at(profile.copy, min(size, PIECE_BYTES))
