"""Where the ranks of a group are, and by what transport they meet: a description, and a decision that is a pure function of it.

Every rank describes what it sees (runtime/session/symm_mem.py looks, `session.bind` exchanges) and all decide alike, on the same
description:

    one host, CPU tensors                                       shared memory
    one host, a GPU each, all peers, over NVLink                symmetric memory, whatever the generation of the GPUs
    several hosts; one GPU for two ranks; no peer access;
    peers over PCIe only                                        c10d: plain collectives, then matmuls; with a reason

What nobody could look up (None) counts as good, and is said in the log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ranks_text

Row = tuple[bool | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    uuid: str
    """The same in all processes of a host."""
    name: str = ""
    capability: tuple[int, int] = (0, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """By rank of the group. `gpus` is empty for CPU tensors; [i][j] of the matrices is what rank i sees of rank j."""

    hosts: tuple[str, ...]
    """Equal texts: the processes share memory. Up to the first colon: the host's name."""
    gpus: tuple[Gpu, ...] = ()
    peer: tuple[Row, ...] = ()
    """Can the GPU of i address the memory of j's?"""
    nvlink: tuple[Row, ...] = ()
    """Does that go over NVLink (directly or through switches)?"""
    any_link: bool = False
    """Take peers over PCIe too: all ranks have UB_OVERLAP_LINKS=any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransportChoice:
    transport: str
    """ "shared memory", "symmetric memory" or "c10d"."""
    reason: str = ""
    """Why it is c10d."""
    unknown: tuple[tuple[int, int], ...] = ()
    """Pairs of ranks between which nobody could tell what links there are."""


def described(cards: Sequence[Mapping[str, Any]], links: Sequence[Mapping[str, Any]]) -> Topology:
    """From what the ranks exchange: cards with "host" and "gpu" (`symmetric.gpu`), and their `symmetric.links` with "any"."""
    return Topology(
        hosts=tuple(card["host"] for card in cards),
        gpus=tuple(
            Gpu(uuid=g["uuid"], name=g["name"], capability=tuple(g["capability"])) for g in (card["gpu"] for card in cards)
        ),
        peer=tuple(tuple(row["peer"]) for row in links),
        nvlink=tuple(tuple(row["nvlink"]) for row in links),
        any_link=all(row["any"] for row in links),
    )


def choose(topology: Topology) -> TransportChoice:
    """The transport of a group of two or more ranks, in the same words on all of them."""
    reason = _hosts(topology)
    if not topology.gpus:
        return TransportChoice(transport="c10d", reason=reason) if reason else TransportChoice(transport="shared memory")
    reason = reason or _one_gpu(topology.gpus) or _no_access(topology.peer) or _pcie(topology)
    if reason:
        return TransportChoice(transport="c10d", reason=reason)
    return TransportChoice(transport="symmetric memory", unknown=_unknown(topology))


def _hosts(topology: Topology) -> str:
    hosts = sorted(set(topology.hosts))
    if len(hosts) < 2:
        return ""
    names = sorted({host.split(":")[0] for host in hosts})
    return f"its ranks do not share memory ({len(hosts)} hosts: {', '.join(names)})"


def _one_gpu(gpus: Sequence[Gpu]) -> str:
    names = [gpu.uuid for gpu in gpus]
    for rank, name in enumerate(names):
        if name in names[:rank]:
            first = names.index(name)
            return f"its ranks {first} and {rank} are on one GPU ({name}), where one would wait for the other for ever"
    return ""


def _no_access(peer: Sequence[Row]) -> str:
    for rank, row in enumerate(peer):
        cannot = [other for other, can in enumerate(row) if can is False and other != rank]
        if cannot:
            return f"the GPU of its rank {rank} has no peer access to that of {ranks_text(cannot)}"
    return ""


def _pcie(topology: Topology) -> str:
    if topology.any_link:
        return ""
    for rank, row in enumerate(topology.nvlink):
        slow = [other for other, link in enumerate(row) if link is False and other != rank]
        if slow:
            return (
                f"the GPU of its rank {rank} reaches that of {ranks_text(slow)} over PCIe only, not over NVLink "
                "(UB_OVERLAP_LINKS=any on all ranks takes it all the same)"
            )
    return ""


def _unknown(topology: Topology) -> tuple[tuple[int, int], ...]:
    pairs = (
        (i, j)
        for i in range(len(topology.gpus))
        for j in range(i)
        if any(m and None in (m[i][j], m[j][i]) for m in (topology.peer, topology.nvlink))
    )
    return tuple((j, i) for i, j in pairs)
