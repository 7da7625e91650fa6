"""Plain collectives of groups across hosts: NCCL's over the network, gloo's over sockets.

    latency     base + step for each rank that a ring passes within a host + hop for each host; an all_reduce passes it twice
    transfer    bytes that a rank sends, at the rate of the host's links to the network divided by its ranks: rings of one
                collective use the links of all ranks of a host. Not faster than the link within the host
    all_to_all  a rank sends its parts for other hosts over its own link to the network, the others over that within the host.
                In a step of a ring the last rank of a host sends all rows to another host

Group sizes that calibration has measured have curves, which come first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .curve import Curve, at


@dataclass(frozen=True, slots=True)
class Network:
    """The links between hosts, and what a collective there and the matmuls that run meanwhile cost each other."""

    source: str
    """Where the numbers come from: measured, or assumed."""
    gbs: float
    """Bytes that one rank sends to another host, in GB/s."""
    base_us: float
    step_us: float
    """From one rank to the next within a host."""
    hop_us: float
    """From one host to the next."""
    matmul_slowdown: float
    """Slowdown of a matmul during a collective, which takes compute units: 0.2 is 20% more time while it lasts."""
    transfer_slowdown: float = 0.0
    """Slowdown of a collective during matmuls that leave compute units to it."""
    collectives: Mapping[str, Mapping[tuple[int, int], Curve]] = field(default_factory=dict)
    """Measured curves by collective and (ranks, hosts), by bytes that a rank sends."""


def network_us(
    network: Network, push: Curve, collective: str, ranks: int, hosts: int, sent: float, to_one_rank: bool = False
) -> float:
    """Return the microseconds of a plain collective across hosts. `sent`: bytes of one rank. `push`: the link in a host.

    `to_one_rank`: an all_to_all in which each rank sends all to one rank.
    """
    curve = network.collectives.get(collective, {}).get((ranks, hosts))
    if curve is not None and not to_one_rank:
        return at(curve, sent)
    passes = 2 if collective == "all_reduce" else 1
    latency = network.base_us + passes * (network.step_us * (ranks - hosts) + network.hop_us * (hosts - 1))
    if collective == "all_to_all":
        remote = sent if to_one_rank else sent * (ranks - ranks / hosts) / max(1, ranks - 1)
        return latency + max(remote / (network.gbs * 1e3), at(push, sent - remote) if ranks > hosts else 0.0)
    across = sent / (network.gbs * 1e3 * ranks / hosts)
    return latency + (max(across, at(push, sent)) if ranks > hosts else across)


def plain_network(network: Network) -> dict[str, Any]:
    """Return a network as JSON values."""
    return {
        "source": network.source,
        "gbs": network.gbs,
        "base_us": network.base_us,
        "step_us": network.step_us,
        "hop_us": network.hop_us,
        "matmul_slowdown": network.matmul_slowdown,
        "transfer_slowdown": network.transfer_slowdown,
        "collectives": {
            kind: {f"{ranks}x{hosts}": [[float(size), float(us)] for size, us in c] for (ranks, hosts), c in curves.items()}
            for kind, curves in network.collectives.items()
        },
    }
