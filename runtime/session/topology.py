"""Topology of a group, and the transport that follows from it.

Every rank describes its GPU and links (symm_mem.py). The ranks exchange this (bind.py), and each decides on the same data
by a pure function:

    one host, CPU tensors                                       shared memory
    one host, one GPU per rank, all peers, over NVLink          symmetric memory, for any GPU generation
    several hosts; two ranks on one GPU; GPUs of two models;
    no peer access; peers over PCIe only                        c10d: plain collectives, then matmuls; with a reason

Settings accept peers over PCIe (`links`) and ranks that share a GPU (`shared_gpus`).

Links that no rank could look up (None) are assumed good, and logged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ranks_text

Row = tuple[bool | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """The GPU of one rank."""

    uuid: str
    """Equal in all processes of a host."""
    name: str = ""
    capability: tuple[int, int] = (0, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Hosts, GPUs and links by rank. `gpus` is empty for CPU tensors; [i][j] of a matrix is rank i's view of rank j."""

    hosts: tuple[str, ...]
    """By rank, from `host.host_id`: "<name>:<boot>;<label>=<value>;...". Equal texts: the processes may share memory."""
    gpus: tuple[Gpu, ...] = ()
    peer: tuple[Row, ...] = ()
    """The GPU of i can address the memory of j's."""
    nvlink: tuple[Row, ...] = ()
    """That access uses NVLink, directly or through switches."""
    any_link: bool = False
    """Accept peers over PCIe too: all ranks have UB_OVERLAP_LINKS=any."""
    shared_gpus: bool = False
    """Accept ranks that share a GPU: all ranks have UB_OVERLAP_SHARED_GPUS=1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransportChoice:
    """The transport of a group."""

    transport: str
    """ "shared memory", "symmetric memory" or "c10d"."""
    reason: str = ""
    """Why it is c10d."""
    unknown: tuple[tuple[int, int], ...] = ()
    """Pairs of ranks with unknown links."""


def build_topology(hosts: Sequence[Mapping[str, Any]], links: Sequence[Mapping[str, Any]]) -> Topology:
    """Build the topology from exchanged texts.

    `hosts`: each with "host" and "gpu" (symm_mem.describe_gpu). `links`: symm_mem.find_links, each with "any" and
    "shared_gpus".
    """
    gpus = (host["gpu"] for host in hosts)
    return Topology(
        hosts=tuple(host["host"] for host in hosts),
        gpus=tuple(Gpu(uuid=gpu["uuid"], name=gpu["name"], capability=tuple(gpu["capability"])) for gpu in gpus),
        peer=tuple(tuple(row["peer"]) for row in links),
        nvlink=tuple(tuple(row["nvlink"]) for row in links),
        any_link=all(row["any"] for row in links),
        shared_gpus=all(row["shared_gpus"] for row in links),
    )


def choose_transport(topology: Topology) -> TransportChoice:
    """Choose the transport of a group of two or more ranks, with the same reason text on all of them."""
    reason = _several_hosts(topology)
    if not topology.gpus:
        return TransportChoice(transport="c10d", reason=reason) if reason else TransportChoice(transport="shared memory")
    reason = reason or _shared_gpu(topology) or _other_gpu(topology.gpus)
    reason = reason or _no_peer_access(topology.peer) or _pcie_only(topology)
    if reason:
        return TransportChoice(transport="c10d", reason=reason)
    return TransportChoice(transport="symmetric memory", unknown=_unknown_pairs(topology))


def _several_hosts(topology: Topology) -> str:
    hosts = sorted(set(topology.hosts))
    if len(hosts) < 2:
        return ""
    names = sorted({host.split(":")[0] for host in hosts})
    if len({host.partition(";")[0] for host in hosts}) == 1:
        parts = [dict(part.split("=", 1) for part in host.split(";")[1:]) for host in hosts]
        differing = [label for label in parts[0] if len({part.get(label) for part in parts}) > 1]
        return f"its ranks do not share memory (one host, {names[0]}, but different {' and '.join(differing)})"
    return f"its ranks do not share memory ({len(hosts)} hosts: {', '.join(names)})"


def _shared_gpu(topology: Topology) -> str:
    if topology.shared_gpus:
        return ""
    uuids = [gpu.uuid for gpu in topology.gpus]
    for rank, uuid in enumerate(uuids):
        if uuid in uuids[:rank]:
            first = uuids.index(uuid)
            return f"its ranks {first} and {rank} are on one GPU ({uuid}), where one would wait for the other forever"
    return ""


def _other_gpu(gpus: Sequence[Gpu]) -> str:
    """Return a reason where GPUs differ: each rank decides alone how kernels are launched, and all must decide alike."""
    for rank, gpu in enumerate(gpus):
        if (gpu.name, gpu.capability) != (gpus[0].name, gpus[0].capability):
            names = (f"{g.name or 'unknown'}, compute capability {'.'.join(map(str, g.capability))}" for g in (gpus[0], gpu))
            return "the GPUs of its ranks 0 and {} differ ({}; {})".format(rank, *names)
    return ""


def _no_peer_access(peer: Sequence[Row]) -> str:
    for rank, row in enumerate(peer):
        unreachable = [other for other, access in enumerate(row) if access is False and other != rank]
        if unreachable:
            return f"the GPU of its rank {rank} has no peer access to that of {ranks_text(unreachable)}"
    return ""


def _pcie_only(topology: Topology) -> str:
    if topology.any_link:
        return ""
    for rank, row in enumerate(topology.nvlink):
        slow = [other for other, link in enumerate(row) if link is False and other != rank]
        if slow:
            return (
                f"the GPU of its rank {rank} reaches that of {ranks_text(slow)} over PCIe only, not over NVLink "
                "(UB_OVERLAP_LINKS=any on all ranks accepts PCIe)"
            )
    return ""


def _unknown_pairs(topology: Topology) -> tuple[tuple[int, int], ...]:
    pairs = (
        (i, j)
        for i in range(len(topology.gpus))
        for j in range(i)
        if any(m and None in (m[i][j], m[j][i]) for m in (topology.peer, topology.nvlink))
    )
    return tuple((j, i) for i, j in pairs)
