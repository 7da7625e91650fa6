"""Timelines of a site's steps, predicted and measured: Chrome / Perfetto JSON, or PNG with matplotlib."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ub_overlap.runtime.errors import OptionError

from ..cost.predict import Prediction
from ..plan.step_kind import COLORS, LABELS, step_kind
from .measured import Measured, StepTime


@dataclass(frozen=True, slots=True)
class Lane:
    """The steps of one site, predicted or measured. The first begins at 0."""

    site: str
    what: str
    steps: tuple[StepTime, ...]

    @property
    def us(self) -> float:
        """The end of the last step."""
        return max((s.end_us for s in self.steps), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """Return the lane as plain data."""
        steps = [[s.queue, s.text, round(s.begin_us, 3), round(s.end_us, 3)] for s in self.steps]
        return {"what": self.what, "us": round(self.us, 3), "steps": steps}


def predicted_lane(site: str, prediction: Prediction, what: str = "predicted") -> Lane:
    """Return the predicted steps of a site."""
    return Lane(site, what, tuple(StepTime(*step) for step in prediction.timeline))


def stored_lanes(lanes: Mapping[str, Sequence[Mapping[str, Any]]], site: str | None = None) -> list[Lane]:
    """Return the lanes of a stored report by "<plan digest>/<site id>". `site`: only those of this site id."""
    return [
        Lane(full.rpartition("/")[2], lane["what"], tuple(StepTime(*step) for step in lane["steps"]))
        for full, own in lanes.items()
        for lane in own
        if site in (None, full, full.rpartition("/")[2])
    ]


def measured_lane(site: str, times: Measured) -> Lane:
    """Return the measured steps of a site."""
    return Lane(site, "measured", start_at_zero(times.steps))


def shift_steps(steps: Sequence[StepTime], by: float) -> tuple[StepTime, ...]:
    """Return the steps moved by a time."""
    return tuple(StepTime(s.queue, s.text, s.begin_us + by, s.end_us + by) for s in steps)


def start_at_zero(steps: Sequence[StepTime]) -> tuple[StepTime, ...]:
    """Return the steps moved so that the first begins at 0."""
    return shift_steps(steps, -min(s.begin_us for s in steps)) if steps else ()


def trace_events(lanes: Sequence[Lane]) -> list[dict[str, Any]]:
    """Return trace events: one process for predicted and one for measured, one thread per queue.

    A site begins where the slower of the two ended the site before it, so that both are aligned.
    """
    out: list[dict[str, Any]] = []
    processes = {what: i + 1 for i, what in enumerate(dict.fromkeys(lane.what for lane in lanes))}
    for what, pid in processes.items():
        out.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": what}})
        for tid, queue in enumerate(("COMPUTE", "COPY")):
            out.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": queue}})
    begin = 0.0
    for site in dict.fromkeys(lane.site for lane in lanes):
        own = [lane for lane in lanes if lane.site == site]
        for lane in own:
            for s in lane.steps:
                out.append(
                    {
                        "name": s.text, "cat": site, "ph": "X", "ts": begin + s.begin_us, "dur": s.end_us - s.begin_us,
                        "pid": processes[lane.what], "tid": int(s.queue == "COPY"), "args": {"site": site},
                    }
                )  # fmt: skip
        begin += max(lane.us for lane in own)
    return out


def write_timeline(path: str | Path, lanes: Sequence[Lane]) -> Path:
    """Write a .png, or JSON for chrome://tracing and ui.perfetto.dev, by the file's suffix.

    OptionError if there is nothing to show, or no matplotlib for a PNG.
    """
    path = Path(path)
    if not any(lane.steps for lane in lanes):
        raise OptionError("there is no timeline to show", got="no steps", expected="a site that is overlapped or measured")
    if path.suffix.lower() == ".png":
        _png(path, lanes)
    else:
        path.write_text(json.dumps({"traceEvents": trace_events(lanes), "displayTimeUnit": "ns"}))
    return path


def _png(path: Path, lanes: Sequence[Lane]) -> None:
    try:
        FigureCanvasAgg = importlib.import_module("matplotlib.backends.backend_agg").FigureCanvasAgg
        Figure = importlib.import_module("matplotlib.figure").Figure
    except ImportError as e:
        raise OptionError(
            "a PNG timeline needs matplotlib",
            got=str(e),
            expected="matplotlib",
            fix="pip install matplotlib, or write JSON: timeline('step.json')",
        ) from e
    figure = Figure(figsize=(12, 1 + 0.9 * len(lanes)))
    axes = figure.add_subplot()
    for row, lane in enumerate(lanes):
        for s in lane.steps:
            height = row + (0.4 if s.queue == "COPY" else 0.0)  # rows grow downwards
            axes.broken_barh(
                [(s.begin_us, s.end_us - s.begin_us)], (height, 0.36), facecolors=COLORS[step_kind(s.text)], edgecolor="white"
            )
    for name, color in COLORS.items():
        axes.broken_barh([], (0, 0), facecolors=color, label=LABELS[name])
    axes.legend(loc="lower right", ncols=len(COLORS), fontsize="small")
    axes.set_yticks([row + 0.4 for row in range(len(lanes))], [f"{lane.site}\n{lane.what}" for lane in lanes])
    axes.set_xlabel("microseconds; above: compute, below: copies")
    axes.invert_yaxis()
    figure.tight_layout()
    FigureCanvasAgg(figure).print_figure(path, dpi=130)
