"""Pictures of a site's steps, predicted beside measured: Chrome / Perfetto JSON, and PNG where matplotlib is installed."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ub_overlap.runtime.errors import OptionError

from ..cost.predict import Prediction
from .measured import Measured, StepTime

COLOURS = {"matmul": "#4878d0", "copy": "#ee854a", "collective": "#d65f5f", "reduce": "#6acc64", "other": "#c0c0c0"}
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True, slots=True)
class Lane:
    """The steps of one site, predicted or measured, from its first step on."""

    site: str
    what: str
    steps: tuple[StepTime, ...]

    @property
    def us(self) -> float:
        return max((s.end_us for s in self.steps), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        steps = [[s.queue, s.text, round(s.begin_us, 3), round(s.end_us, 3)] for s in self.steps]
        return {"what": self.what, "us": round(self.us, 3), "steps": steps}


def predicted(site: str, prediction: Prediction, what: str = "predicted") -> Lane:
    return Lane(site, what, tuple(StepTime(*step) for step in prediction.timeline))


def measured(site: str, found: Measured) -> Lane:
    return Lane(site, "measured", from_zero(found.steps))


def kind(step: StepTime) -> str:
    """What a step's text begins with, as one of COLOURS."""
    word = step.text.lower().partition(" ")[0]
    return "collective" if word in _COLLECTIVES else word if word in COLOURS else "other"


def shifted(steps: Sequence[StepTime], by: float) -> tuple[StepTime, ...]:
    return tuple(StepTime(s.queue, s.text, s.begin_us + by, s.end_us + by) for s in steps)


def from_zero(steps: Sequence[StepTime]) -> tuple[StepTime, ...]:
    """The same steps, the first of which begins at 0."""
    return shifted(steps, -min(s.begin_us for s in steps)) if steps else ()


def events(lanes: Sequence[Lane]) -> list[dict[str, Any]]:
    """Trace events: a process for predicted and one for measured, a thread a queue. A site begins where the slower of the two
    ended the one before it, so that both lie below each other."""
    out: list[dict[str, Any]] = []
    processes = {what: i + 1 for i, what in enumerate(dict.fromkeys(lane.what for lane in lanes))}
    for what, pid in processes.items():
        out.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": what}})
        for tid, queue in enumerate(("COMPUTE", "COPY")):
            out.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": queue}})
    begin = 0.0
    for site in dict.fromkeys(lane.site for lane in lanes):
        mine = [lane for lane in lanes if lane.site == site]
        for lane in mine:
            for s in lane.steps:
                out.append(
                    {
                        "name": s.text, "cat": site, "ph": "X", "ts": begin + s.begin_us, "dur": s.end_us - s.begin_us,
                        "pid": processes[lane.what], "tid": int(s.queue == "COPY"), "args": {"site": site},
                    }
                )  # fmt: skip
        begin += max(lane.us for lane in mine)
    return out


def write(path: str | Path, lanes: Sequence[Lane]) -> Path:
    """Writes the picture that the name's ending asks for: .png, else JSON for chrome://tracing and ui.perfetto.dev. OptionError
    where there is nothing to show, or no matplotlib for a PNG."""
    path = Path(path)
    if not any(lane.steps for lane in lanes):
        raise OptionError("there is no timeline to show", got="no steps", expected="a site that is overlapped or measured")
    if path.suffix.lower() == ".png":
        _png(path, lanes)
    else:
        path.write_text(json.dumps({"traceEvents": events(lanes), "displayTimeUnit": "ns"}))
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
                [(s.begin_us, s.end_us - s.begin_us)], (height, 0.36), facecolors=COLOURS[kind(s)], edgecolor="white"
            )
    for name, colour in COLOURS.items():
        axes.broken_barh([], (0, 0), facecolors=colour, label=name)
    axes.legend(loc="lower right", ncols=len(COLOURS), fontsize="small")
    axes.set_yticks([row + 0.4 for row in range(len(lanes))], [f"{lane.site}\n{lane.what}" for lane in lanes])
    axes.set_xlabel("microseconds; above: compute, below: copies")
    axes.invert_yaxis()
    figure.tight_layout()
    FigureCanvasAgg(figure).print_figure(path, dpi=130)
