"""The measurements in their order, and the JSON that they make (the cost model's profile, compiler/cost/profile.py).

What could not be measured is a named hole, filled from `base`, the profile that ships for this kind of device.
"""

from __future__ import annotations

import copy
import statistics
import warnings
from datetime import UTC, datetime
from typing import Any

import torch

from ub_overlap.runtime import machine

from . import kernels, matmuls, traffic
from .world import Burst, Calibration, ProgressLine

BUDGET_S = 90.0
MATMULS_UNTIL_S = 70.0


def run(world: Calibration, base: dict[str, Any], quick: bool = False, source: str = "") -> dict[str, Any]:
    """A profile as JSON values, not fitted to its whole calls yet. Collective; the same on every rank.

    `base`: a profile as JSON values, for what cannot be measured here. `source`: the command, for the profile's own account.
    """
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    made = copy.deepcopy(base)
    key = machine.key(world.device.type, world.ranks)
    keys = world.gather(key)
    differ = [f"rank {r}: {name}" for r, other in enumerate(keys) for name in machine.same_machine(keys[0], other)]
    if differ:
        world.holes.append(f"the ranks' machines differ ({', '.join(differ[:4])}); the key is rank 0's")
    here = base.get("key", {}).get("gpu") == keys[0].get("gpu")
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    made.update(
        name=f"{keys[0].get('gpu', 'cpu')} x{world.ranks}",
        key=keys[0],
        source=f"measured {when}{': ' + source if source else ''}",
        holes=[],
    )
    total = len(matmuls.points(world.cuda, quick)) + (120 if world.cuda else 60) // (2 if quick else 1)
    progress = ProgressLine(world, total)
    peers: traffic.PeerTraffic | None = None
    if world.cuda:
        made["compute"].update(units=keys[0]["units"], cache_mib=machine.cache_mib())
        peers = world.probe("symmetric memory", lambda: traffic.PeerTraffic(world, (64 if quick else 256) * traffic.MIB))
    burst = Burst(world, peers.together if peers else None)
    burst.settle(0.2)
    with torch.no_grad():
        _traffic(world, burst, peers, progress, quick, made, here)
        made["checks"] = _kernels(world, burst, progress, quick, made)
        found = matmuls.measure(world, burst, progress, quick, MATMULS_UNTIL_S)
    if found:
        made["matmuls"] = [list(row) for row in found]
        _layouts(made)
    progress.step("done", total)
    progress.close()
    made["holes"] = list(world.holes)
    return _rounded(made)


def _traffic(
    world: Calibration,
    burst: Burst,
    peers: traffic.PeerTraffic | None,
    progress: ProgressLine,
    quick: bool,
    made: dict[str, Any],
    here: bool,
) -> None:
    if peers:
        curve = world.probe("pushes", lambda: traffic.pushes(world, burst, peers, progress, quick))
        made["push"] = curve or made["push"]
        flag = world.probe("flags", lambda: traffic.flag(world, burst, peers))
        made["steps"]["flag_us"] = flag or made["steps"]["flag_us"]
        slow = world.probe("a matmul beside pushes", lambda: traffic.beside(world, burst, peers, progress))
        if slow:
            made["beside"] = {"matmul": slow[0], "push": slow[1]}
    curves = world.probe("collectives", lambda: traffic.collectives(world, burst, progress, quick))
    if curves:
        # Curves of other group sizes stay where they are of the same GPU.
        for kind, curve in curves.items():
            made["collectives"][kind] = {**(made["collectives"].get(kind, {}) if here else {}), str(world.ranks): curve}


def _kernels(
    world: Calibration, burst: Burst, progress: ProgressLine, quick: bool, made: dict[str, Any]
) -> list[kernels.Check]:
    steps = made["steps"]
    kernel_us = world.probe("small kernels", lambda: kernels.small_kernel(world, burst)) or 2.0
    if world.cuda:
        steps.update(wait_us=kernel_us, arrive_us=kernel_us, signal_us=kernel_us, begin_us=kernel_us, end_us=kernel_us)
        made["compute"]["launch_us"] = kernel_us
        event = world.probe("events", lambda: kernels.events(world, burst, kernel_us))
        steps["event_us"] = event or steps["event_us"]
    calls = world.probe("our ops", lambda: kernels.Calls(world))
    if calls is None:
        return []
    curves = world.probe("copies and reductions", lambda: kernels.memory(world, calls, kernel_us, progress, quick))
    made.update(curves or {})
    if not world.cuda:
        steps.update(world.probe("small steps", lambda: kernels.cpu_steps(world, calls)) or {})
    return world.probe("whole calls", lambda: kernels.checks(world, burst, calls, progress, quick)) or []


def _layouts(made: dict[str, Any]) -> None:
    """Layouts against "nt", by pairs of the same shape."""
    times = {(layout, dtype, *shape): us for layout, dtype, *shape, us in made["matmuls"]}
    for layout in ("nn", "tn"):
        pairs = [us / times[("nt", *rest)] for (own, *rest), us in times.items() if own == layout and ("nt", *rest) in times]
        if pairs:
            made["compute"]["layouts"][layout] = statistics.median(pairs)


def _rounded(value: Any) -> Any:
    """Floats to five significant digits: more is noise. Whole numbers are sizes, and stay."""
    if isinstance(value, float):
        return value if value.is_integer() else float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value
