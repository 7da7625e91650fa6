"""Run the measurements in order and return the profile as JSON values (compiler/cost/profile.py).

A measurement that failed is a named hole, filled from `base`, the shipped profile for this kind of device.
"""

from __future__ import annotations

import copy
import json
import statistics
import warnings
from datetime import UTC, datetime
from typing import Any

import torch

from ub_overlap.compiler.cost.profile import Profile
from ub_overlap.compiler.plan.reasons import COLLECTIVES
from ub_overlap.runtime import machine

from . import attention, direct_stores, few_tokens, kernels, matmuls, traffic
from .fit import fit_rates
from .world import Burst, CalibrationWorld, ProgressLine

BUDGET_S = 90.0
MATMULS_UNTIL_S = 70.0


def run(world: CalibrationWorld, base: dict[str, Any], quick: bool = False, source: str = "") -> dict[str, Any]:
    """Measure a profile and return it as JSON values, not yet fitted to its whole calls. Collective; equal on every rank.

    `base`: a profile as JSON values, for failed measurements. `source`: the command, recorded in the profile.
    """
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    made = copy.deepcopy(base)
    key = machine.key(world.device.type, world.ranks)
    keys = world.gather(key)
    differ = [f"rank {r}: {name}" for r, other in enumerate(keys) for name in machine.differing_fields(keys[0], other)]
    if differ:
        world.holes.append(f"the ranks' machines differ ({', '.join(differ[:4])}); the key is rank 0's")
    is_same_gpu = base.get("key", {}).get("gpu") == keys[0].get("gpu")
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    made.update(
        name=f"{keys[0].get('gpu', 'cpu')} x{world.ranks}",
        key=keys[0],
        source=f"measured {when}{': ' + source if source else ''}",
        holes=[],
    )
    total = (
        len(matmuls.points(world.cuda, quick))
        + 2 * len(direct_stores.shapes(world.cuda, quick))
        + 2 * few_tokens.points(world.cuda, quick)
        + attention.POINTS
        + 2 * len(COLLECTIVES) * len(traffic.collective_sizes(world, quick))
        + (60 if world.cuda else 36) // (2 if quick else 1)
    )
    progress = ProgressLine(world, total)
    peers: traffic.PeerTraffic | None = None
    if world.cuda:
        made["compute"].update(units=keys[0]["units"], cache_mib=machine.cache_mib())
        peers = world.probe("symmetric memory", lambda: traffic.PeerTraffic(world, (64 if quick else 256) * traffic.MIB))
    burst = Burst(world, peers.together if peers else None)
    burst.settle(0.2)
    with torch.no_grad():
        _measure_traffic(world, burst, peers, progress, quick, made, is_same_gpu)
        made["checks"] = _measure_kernels(world, burst, progress, quick, made, is_same_gpu)
        made.pop("attention", None)  # of the base profile
        rates = world.probe("attention", lambda: attention.measure(world, burst, progress, quick))
        if rates:
            made["attention"] = rates
        rows = matmuls.measure(world, burst, progress, quick, MATMULS_UNTIL_S)
        if rows:
            _set_matmuls(made, rows)
            fitted = fit_rates(Profile.from_json(json.dumps(_rounded(made)), "this calibration"))
            _set_matmuls(made, matmuls.measure_again(world, burst, progress, rows, fitted))
    progress.step("done", total)
    progress.close()
    made["holes"] = list(world.holes)
    made["source"] += _source_of_other_sizes(made, base, world.ranks)
    return _rounded(made)


def _measure_traffic(
    world: CalibrationWorld,
    burst: Burst,
    peers: traffic.PeerTraffic | None,
    progress: ProgressLine,
    quick: bool,
    made: dict[str, Any],
    is_same_gpu: bool,
) -> None:
    """Measure pushes and collectives. `is_same_gpu`: `made` starts from a profile of this GPU."""
    if peers:
        curve = world.probe("pushes", lambda: traffic.pushes(world, burst, peers, progress, quick))
        made["push"] = curve or made["push"]
        flag = world.probe("flags", lambda: traffic.flag(world, burst, peers))
        made["steps"]["flag_us"] = flag or made["steps"]["flag_us"]
        push = peers.round(min(16 * traffic.MIB, peers.max_bytes))
        slowdown = world.probe(
            "a matmul concurrent with pushes",
            lambda: traffic.concurrent_slowdown(world, burst, push, peers.side, peers.together, progress),
        )
        if slowdown:
            made["slowdown"] = {"matmul": slowdown[0], "push": slowdown[1]}
    curves = world.probe("collectives", lambda: traffic.collectives(world, burst, progress, quick))
    if curves:
        # Keep curves of other group sizes only if the base profile is of the same GPU.
        for kind, curve in curves.items():
            others = made["collectives"].get(kind, {}) if is_same_gpu else {}
            made["collectives"][kind] = {**others, str(world.ranks): curve}


def _measure_kernels(
    world: CalibrationWorld, burst: Burst, progress: ProgressLine, quick: bool, made: dict[str, Any], is_same_gpu: bool
) -> list[kernels.TimedCall]:
    """Measure our ops and return whole calls. `is_same_gpu`: as in `_measure_traffic`."""
    shipped = made.pop("fused", {})  # curves of other group sizes stay only if they are of the same GPU
    known = shipped if is_same_gpu else {}
    steps = made["steps"]
    kernel_us = world.probe("small kernels", lambda: kernels.small_kernel(world, burst)) or 2.0
    if world.cuda:
        steps.update(wait_us=kernel_us, arrive_us=kernel_us, signal_us=kernel_us, begin_us=kernel_us, end_us=kernel_us)
        made["compute"]["launch_us"] = kernel_us
        event = world.probe("events", lambda: kernels.events(world, burst, kernel_us))
        steps["event_us"] = event or steps["event_us"]
    calls = world.probe("ub_overlap ops", lambda: kernels.Calls(world))
    if calls is None:
        return []
    few = world.probe("few tokens", lambda: few_tokens.measure(world, burst, calls, progress.step, quick))
    if few:
        made["fused"] = {kind: {**known.get(kind, {}), str(world.ranks): curves} for kind, curves in few.items()}
        made["fused"]["source"] = made["source"]
    curves = world.probe("copies and reductions", lambda: kernels.memory(world, calls, kernel_us, progress, quick))
    made.update(curves or {})
    if curves and world.cuda:
        _set_memory_rate(made)
    made.pop("direct", None)  # of the base profile: what was not measured here is not used
    direct = world.probe("stores at peers", lambda: direct_stores.measure(world, burst, calls, kernel_us, progress.step, quick))
    if direct:
        made["direct"] = direct
    if not world.cuda:
        steps.update(world.probe("small steps", lambda: kernels.cpu_steps(world, calls)) or {})
    return world.probe("whole calls", lambda: kernels.checks(world, burst, calls, progress, quick)) or []


def _set_memory_rate(made: dict[str, Any]) -> None:
    """Set the rate of device memory to that of the largest reduction, where no cache holds it."""
    size, us = made["reduce"][-1]
    if size > 2 * made["compute"]["cache_mib"] * traffic.MIB:
        made["compute"]["memory_gbs"] = size / us / 1e3


def _source_of_other_sizes(made: dict[str, Any], base: dict[str, Any], ranks: int) -> str:
    """Return where the collectives of other group sizes come from, as an addition to the source; "" without any."""
    others = sorted({int(size) for curves in made["collectives"].values() for size in curves} - {ranks})
    return f"; collectives of {', '.join(map(str, others))} ranks from profile {base['name']}" if others else ""


def _set_matmuls(made: dict[str, Any], rows: list[tuple[Any, ...]]) -> None:
    """Set the matmuls, and the time of other layouts relative to "nt", from pairs of the same shape."""
    made["matmuls"] = [list(row) for row in rows]
    times = {(layout, dtype, *shape): us for layout, dtype, *shape, us in made["matmuls"]}
    for layout in ("nn", "tn"):
        pairs = [us / times[("nt", *rest)] for (own, *rest), us in times.items() if own == layout and ("nt", *rest) in times]
        if pairs:
            made["compute"]["layouts"][layout] = statistics.median(pairs)


def _rounded(value: Any) -> Any:
    """Round floats to five significant digits: more is noise. Integral floats are sizes and stay."""
    if isinstance(value, float):
        return value if value.is_integer() else float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value
