"""Host time of a step: how long its calls take to return, and how much of that each op takes itself.

Tables are drawn without torch."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ub_overlap.compiler.text.table import render_table

if TYPE_CHECKING:
    from ub_overlap.tools.rank_process import World

STEPS = 10
SHOWN = 20
"""Ops in the table."""
_HASH = re.compile(r"(Call CompiledFxGraph) \w+")


def measure_ops(call: Callable[[], Any], world: World) -> dict[str, list[float]]:
    """Return [calls, microseconds of its own on the host] per step by op, of STEPS profiled steps; collective.

    The profiler adds to every op: these times show where time goes, not how much there is. On the CPU they include the
    computation."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as trace:
        for _ in range(STEPS):
            call()
        world.sync()
    ops: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in trace.key_averages():
        name = _HASH.sub(r"\1", row.key)
        ops[name][0] += row.count / STEPS
        ops[name][1] += row.self_cpu_time_total / STEPS
    return dict(sorted(ops.items(), key=lambda op: -op[1][1]))


def text(variants: dict[str, Any], style: str) -> str:
    """Return the table of a size: until a step returns, then the ops that take most, of all variants with host times."""
    measured = {name: v["host"] for name, v in variants.items() if "host" in v}
    most = {
        op: max(host["ops"].get(op, (0, 0))[1] for host in measured.values())
        for host in measured.values()
        for op in host["ops"]
    }
    shown = sorted(most, key=lambda op: -most[op])[:SHOWN]
    rows = [{"host, us": "until a step returns"} | {name: f"{host['step_us']:.0f}" for name, host in measured.items()}]
    rows.append(
        {"host, us": "until a forward returns"} | {name: f"{host['forward_us']:.0f}" for name, host in measured.items()}
    )
    for op in shown:
        row = {"host, us": op[:60]}
        for name, host in measured.items():
            calls, us = host["ops"].get(op, (0, 0.0))
            row[name] = f"{us:.0f} ({calls:g} x)" if calls else "-"
        rows.append(row)
    return render_table(rows, style=style)
