"""Measure the network: plain collectives of ranks on several hosts, and what they and concurrent matmuls cost each other.

Everything else is measured within one host, so it is taken from a profile of such ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import torch
import torch.distributed as dist

from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.cost.curve import Curve
from ub_overlap.compiler.cost.network import Network, network_us, plain_network
from ub_overlap.compiler.cost.profile import Profile, rising
from ub_overlap.compiler.graph.aten import aten
from ub_overlap.compiler.plan.reasons import COLLECTIVES
from ub_overlap.runtime import settings
from ub_overlap.runtime.session.spared_multiprocessors import most_spared

from . import traffic
from .world import Burst, CalibrationWorld, ProgressLine


def run(world: CalibrationWorld, base: Profile, hosts: int, quick: bool, source: str) -> Profile:
    """Return `base` with a measured network. Collective; equal on all ranks. `source`: the command, recorded in the profile."""
    assert base.network is not None
    timed = 2 * len(COLLECTIVES) * len(traffic.collective_sizes(world, quick))
    progress = ProgressLine(world, timed + (40 if world.cuda else 0))
    burst = Burst(world)
    burst.settle(0.2)
    with torch.no_grad():
        measured = world.probe("collectives", lambda: traffic.collectives(world, burst, progress, quick)) or {}
        slowdowns: dict[str, Any] = {}
        if world.cuda:
            slowdowns = {
                "matmul_slowdown": world.probe(
                    "a matmul concurrent with a collective", lambda: _matmul_slowdown(world, burst, progress)
                ),
                "transfer_slowdown": world.probe(
                    "a collective concurrent with matmuls", lambda: _transfer_slowdown(world, burst, progress)
                ),
            }
    progress.close()
    if not measured:
        return base
    curves = {kind: rising((float(size), float(f"{us:.5g}")) for size, us in points) for kind, points in measured.items()}
    network = fit_network(base.network, base.push, curves, world.ranks, hosts)
    known = {name: slowdown for name, slowdown in slowdowns.items() if slowdown is not None}
    network = replace(network, **known)
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    assumed = "" if len(known) == 2 else "; not all slowdowns measured"
    return replace(base, network=replace(network, source=f"measured {when} on {hosts} hosts: {source}{assumed}"))


def fit_network(base: Network, push: Curve, measured: Mapping[str, Curve], ranks: int, hosts: int) -> Network:
    """Return `base` with measured curves of a group, for other groups with the rate and the latencies that they show.

    Rate: what the largest all_gather needs for its last bytes. Latencies keep their proportions, and predict the smallest
    collectives on average.
    """
    curves: dict[str, dict[tuple[int, int], Curve]] = copy.deepcopy({k: dict(v) for k, v in base.collectives.items()})
    for kind, curve in measured.items():
        curves.setdefault(kind, {})[ranks, hosts] = curve
    (before, us_before), (last, us_last) = measured["all_gather"][-2:]
    gbs = (last - before) / max(us_last - us_before, 1e-3) / 1e3 * hosts / ranks
    scaled = replace(base, gbs=float(f"{gbs:.4g}"), collectives={})
    without = replace(scaled, base_us=0.0, step_us=0.0, hop_us=0.0)
    ratios = []
    for kind, ((size, us), *_) in measured.items():
        transfer = network_us(without, push, kind, ranks, hosts, size)
        latency = network_us(scaled, push, kind, ranks, hosts, size) - transfer
        ratios.append(max(us - transfer, 0.0) / latency)
    factor = sum(ratios) / len(ratios)
    names = ("base_us", "step_us", "hop_us")
    latencies: dict[str, Any] = {name: float(f"{getattr(base, name) * factor:.4g}") for name in names}
    return replace(scaled, **latencies, collectives=curves)


def _matmul_slowdown(world: CalibrationWorld, burst: Burst, progress: ProgressLine) -> float:
    """Return the slow-down of a matmul concurrent with all_gathers, 0.3 for 30%."""
    few = 16 * traffic.MIB // (2 * world.ranks)
    small = torch.ones(few, device=world.device, dtype=torch.bfloat16)
    big = torch.ones(few * world.ranks, device=world.device, dtype=torch.bfloat16)
    side = torch.cuda.Stream(priority=-1)
    gather: Any = lambda: dist.all_gather_into_tensor(big, small)  # noqa: E731  on the side stream, as it is then current
    return traffic.concurrent_slowdown(world, burst, gather, side, lambda: None, progress)[0]


def _transfer_slowdown(world: CalibrationWorld, burst: Burst, progress: ProgressLine) -> float:
    """Return the slow-down of all_to_alls concurrent with matmuls of experts, which leave multiprocessors to NCCL."""
    group: Any = dist.group.WORLD
    experts, each, width, inner = 8, 1024, 4096, 2048
    rows = torch.randn(experts * each, width, device=world.device).to(torch.bfloat16)
    weights = torch.randn(experts, width, inner, device=world.device).to(torch.bfloat16)
    ends = torch.arange(each, experts * each + 1, each, device=world.device, dtype=torch.int32)
    sent = torch.ones(64 * traffic.MIB // 2, device=world.device, dtype=torch.bfloat16)
    received = torch.ones_like(sent)
    side = torch.cuda.Stream(priority=-1)
    exchange: Any = lambda: dist.all_to_all_single(received, sent)  # noqa: E731  on the side stream, as it is then current
    matmul: Any = lambda: aten._grouped_mm.default(rows, weights, ends)  # noqa: E731
    before = compat.get_carveout()
    spared = min(settings.current().nccl_multiprocessors, most_spared(str(group.group_name), "cuda"))
    compat.set_carveout(spared or before)
    try:
        return traffic.concurrent_slowdown(world, burst, exchange, side, lambda: None, progress, matmul)[1]
    finally:
        compat.set_carveout(before)


def summarize(network: Network) -> str:
    """Return the measurement in a few lines."""
    lines = [
        f"  network: {network.gbs:.4g} GB/s a rank to other hosts; latencies {network.base_us:.3g} us, "
        f"{network.step_us:.3g} us for each rank, {network.hop_us:.3g} us for each host; a concurrent matmul takes "
        f"{network.matmul_slowdown:.0%} longer, a collective concurrent with matmuls {network.transfer_slowdown:.0%}"
    ]
    for kind, curves in plain_network(network)["collectives"].items():
        lines += [
            f"  {kind} {size}: {points[-1][0] / 2**20:.3g} MiB in {points[-1][1]:.0f} us" for size, points in curves.items()
        ]
    return "\n".join(lines)
