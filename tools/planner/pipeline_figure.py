"""Draw steps of pipelines as HTML: one lane per rank, one box per microbatch of a stage."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .pipeline_orders import Work
from .pipeline_run import PipelineRun, Played

_WIDTH, _LEFT, _LANE, _BOX = 1200, 52, 20, 16
_COLORS = {
    Work.FORWARD: "var(--matmul)",
    Work.BACKWARD: "var(--copy)",
    Work.INPUT_GRADIENT: "var(--copy)",
    Work.WEIGHT_GRADIENT: "var(--reduce)",
}
_NAMES = {Work.FORWARD: "forward", Work.BACKWARD: "backward", Work.INPUT_GRADIENT: "input gradient", Work.WEIGHT_GRADIENT: "W"}


def draw(runs: Sequence[tuple[str, PipelineRun]]) -> str:
    """Return HTML with one drawing per run, all in one scale. The first is open."""
    longest = max(run.us for _, run in runs)
    return "\n".join(
        f'<details class="pipeline"{" open" if i == 0 else ""}><summary>{escape(title)}</summary>{_svg(run, longest)}</details>'
        for i, (title, run) in enumerate(runs)
    )


def _svg(run: PipelineRun, longest: float) -> str:
    scale = (_WIDTH - _LEFT) / longest
    height = _LANE * len(run.ranks)
    lanes = []
    for rank, row in enumerate(run.ranks):
        top = rank * _LANE
        lanes.append(f'<text x="0" y="{top + 13}">rank {rank}</text>')
        lanes += [_box(played, _LEFT + played.begin_us * scale, top, scale) for played in row]
    return f'<svg class="lanes" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="step">{"".join(lanes)}</svg>'


def _box(played: Played, left: float, top: int, scale: float) -> str:
    a, width = played.action, (played.end_us - played.begin_us) * scale
    title = f"{_NAMES[a.work]} of microbatch {a.microbatch}, stage {a.stage}: {played.begin_us:.0f} to {played.end_us:.0f} us"
    text = f'<text x="{left + 2:.1f}" y="{top + 13}" style="fill:#fff">{a.microbatch}</text>' if width > 12 else ""
    size = f'width="{max(width - 0.5, 0.5):.1f}" height="{_BOX}"'
    return f'<rect x="{left:.1f}" y="{top + 1}" {size} style="fill:{_COLORS[a.work]}"><title>{title}</title></rect>{text}'
