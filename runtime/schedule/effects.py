"""Effects of a step on memory and flags. Only this file knows every step class.

The checker, the flag rules and happens-before use these effects, so a new step class is a new case here only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .steps import Buf, Compute, Copy, Finish, Flag, Opaque, Reduce, Region, Release, Signal, Step, Wait


@dataclass(frozen=True, slots=True)
class Access:
    """One region read or written. `adds`: the write accumulates (or rounds in place), so it needs a store before it."""

    region: Region
    write: bool
    adds: bool = False


def accesses(step: Step, rank: int) -> Iterator[Access]:
    """Yield the regions that `step` of `rank` accesses, reads first: every step reads before it writes."""
    match step:
        case Copy():
            yield Access(step.src, False)
            yield Access(step.dst, True)
        case Compute():
            yield from (Access(region, False) for region in step.reads)
            yield from (Access(region, True, step.accumulate) for region in step.writes)
        case Reduce():
            yield from (Access(region, False) for region in step.srcs)
            yield Access(step.dst, True)
        case Finish():
            yield Access(Region(Buf.RESULT, rank, 0, index=step.index), True, True)
        case Release():
            yield from (Access(region, False) for region in step.reads)
        case Opaque():
            yield from (Access(region, False) for region in step.reads)
            yield from (Access(region, True) for region in step.writes)


def waits(step: Step) -> tuple[Wait, ...]:
    """Return the flag waits that `step` is or contains."""
    match step:
        case Wait():
            return (step,)
        case Compute():
            return step.gates
        case Opaque():
            return step.waits
    return ()


def signals(step: Step) -> tuple[Flag, ...]:
    """Return the flags that `step` writes."""
    match step:
        case Signal():
            return (step.flag,)
        case Opaque():
            return tuple(signal.flag for signal in step.signals)
    return ()


def show_region(region: Region) -> str:
    """Return ``LANDING@2[3:1/2..1]``: buffer, rank, shard, interval. ``RESULT.1`` is consumer 1, ``LANDING.1`` shard 1."""
    piece = "" if (region.lo, region.hi) == (0, 1) else f":{region.lo}..{region.hi}"
    index = f".{region.index}" if region.buf is Buf.RESULT or region.index else ""
    return f"{region.buf.name}{index}@{region.rank}[{region.shard}{piece}]"


def show_flag(flag: Flag, back: int = 0) -> str:
    """Return ``READY@2 from 1 #0``: the rank that holds the word, the rank that writes it, and the piece."""
    when = f" of epoch e-{back}" if back else ""
    return f"{flag.kind.name}@{flag.rank} from {flag.source} #{flag.index}{when}"


def show(step: Step) -> str:
    """Return a step in a few words, for errors and drawings."""
    match step:
        case Copy():
            text = f"{show_region(step.src)} -> {show_region(step.dst)}"
        case Signal():
            text = show_flag(step.flag)
        case Wait():
            text = show_flag(step.flag, step.back)
        case Compute():
            reads = " ".join(show_region(region) for region in step.reads)
            writes = " ".join(show_region(region) for region in step.writes)
            text = f"{step.index} {reads}{' ' if reads else ''}{'+>' if step.accumulate else '->'} {writes}"
            text += "".join(f" gate {show_flag(gate.flag, gate.back)}" for gate in step.gates)
        case Reduce():
            text = f"{' + '.join(show_region(region) for region in step.srcs)} -> {show_region(step.dst)}"
        case Finish():
            text = str(step.index)
        case Release():
            text = " ".join(show_region(region) for region in step.reads)
        case Opaque():
            text = step.name
        case _:
            text = ""
    return f"{type(step).__name__} {text}"
