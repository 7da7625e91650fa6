"""What delayed scaling remembers: the largest finite magnitude of each quantised tensor in its last calls.

Legend: N tensors of a graph, H = LENGTH calls.

    forward begins   seen = fp8_seen(keys)               [N], and sets what was seen to 0
                     seen = all_reduce(seen, max)        where shards are gathered: one scale for all ranks
                     most = fp8_history(seen, keys)      pushes it into the histories [H], their maxima [N]
    tensor by tensor q, scale = fp8_quantise(x, most, at, key, format)    by most[at], and notes what it saw of x
    backward         the same, by the same `most`

A call of a graph's forward is a step: that of a microbatch too, on all ranks alike. A tensor that was not seen since the last
one keeps its history (backward may come later, or never). An empty history means the scale of the current values.

Nothing waits for the device, and memory keeps its address: the ops may be captured in CUDA graphs once they have run. What
fp8_quantise notes is a maximum, so running it again changes nothing; the results of all three are copies.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import errors
from .threads import apart

LENGTH = 16
"""Calls that a history remembers."""
CAPACITY = 8192
"""Tensors of a state on one device: memory that captured graphs write to cannot grow."""
HEADROOM = 2.0
"""By how much a tensor may grow over its history before it saturates: a binade of 18 (e4m3) or 32 (e5m2), and no bit."""
TINY = 2.0**-120
"""The least scale, as without delay (compiler/fp8/recipe.py)."""
_SEPARATOR = ";"


@dataclass(slots=True, eq=False)
class _Bank:
    """A state's memory on one device: `seen` [CAPACITY], `past` [LENGTH, CAPACITY], newest first; `slots`: column by key."""

    seen: Tensor
    past: Tensor
    slots: dict[str, int] = field(default_factory=dict)
    columns: dict[str, Tensor] = field(default_factory=dict)
    """Of a graph, by the text of its keys."""

    def value(self, key: str) -> Tensor:
        """[1 + LENGTH]: what was seen since the last call, and the history."""
        at = self.slots[key]
        return torch.cat([self.seen[at : at + 1], self.past[:, at]])

    def set(self, key: str, value: Tensor) -> None:
        at = self.slots[key]
        self.seen[at].copy_(value[0])
        self.past[:, at].copy_(value[1:])


class Fp8State:
    """The histories of the models that compile with `fp8_state=name`, on this rank.

    Keys are "module path/x" (what a linear multiplies) and "module path/dy" (the gradient of its result), with "#1", "#2" where
    a graph calls a module again. They outlive recompilation: graphs of one model share them.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._banks: dict[torch.device, _Bank] = {}
        self._waiting: dict[str, Tensor] = {}
        self._lock = threading.Lock()

    def state_dict(self) -> dict[str, Tensor]:
        """By key a copy, float32 [1 + LENGTH]: the largest magnitude since the last call, then those of the calls before it,
        newest first. Each rank saves its own."""
        with self._lock:
            found = {key: value.clone() for key, value in self._waiting.items()}
            return found | {key: bank.value(key) for bank in self._banks.values() for key in bank.slots}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes what `state_dict` gave. Before the first step it is kept until graphs ask for their keys; later the keys must
        be those that there are. Fp8StateError names the first key that is not as it must be, and nothing is loaded."""
        with self._lock:
            for key, value in state.items():
                if not isinstance(value, Tensor) or value.shape != (1 + LENGTH,) or value.dtype != torch.float32:
                    got = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                    raise self._error(f"the history {key!r} cannot be loaded", got, f"torch.float32 [{1 + LENGTH}]")
            homes = {key: bank for bank in self._banks.values() for key in bank.slots}
            known = homes.keys() | self._waiting.keys()
            for wrong, what in ((known - state.keys(), "is not in what is loaded"), (state.keys() - known, "is of no tensor")):
                if homes and wrong:
                    got, expected = f"{len(state)} keys", f"the {len(known)} keys of state_dict()"
                    raise self._error(f"the history {min(wrong)!r} {what}", got, expected)
            with torch.no_grad():
                for key, value in state.items():
                    if key in homes:
                        homes[key].set(key, value)
                    else:
                        self._waiting[key] = value.detach().clone()

    def reset(self) -> None:
        """Forgets all histories, in place."""
        with self._lock, torch.no_grad():
            self._waiting.clear()
            for bank in self._banks.values():
                bank.seen.zero_()
                bank.past.zero_()

    def graph(self, keys: str, device: torch.device) -> tuple[_Bank, Tensor]:
        """The memory of a graph's tensors, and their columns int64 [N]. `keys`: joined by ";"."""
        bank = self._banks.get(device)
        if bank is None or keys not in bank.columns:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise self._error("histories are made at the first call, and this one is being captured", keys, "a call before")
            bank = apart("ub_overlap fp8 state", lambda: self._add(keys, device)).result()
        return bank, bank.columns[keys]

    def slot(self, key: str, device: torch.device) -> tuple[_Bank, int]:
        bank = self._banks.get(device)
        if bank is None or key not in bank.slots:
            bank, _ = self.graph(key, device)
        return bank, bank.slots[key]

    def _add(self, keys: str, device: torch.device) -> _Bank:
        """Runs on a thread of its own: no mode of the caller's, and no memory pool of a graph that is being recorded."""
        names = keys.split(_SEPARATOR)
        with self._lock, _apart_from_callers(device):
            for home, bank in self._banks.items():
                for key in names:
                    if home != device and key in bank.slots:
                        raise self._error(f"the history {key!r} is on {home}", str(device), "one device a module")
            bank = self._banks.get(device)
            if bank is None:
                bank = _Bank(torch.zeros(CAPACITY, device=device), torch.zeros(LENGTH, CAPACITY, device=device))
            new = [key for key in names if key not in bank.slots]
            if len(bank.slots) + len(new) > CAPACITY:
                raise self._error("too many float8 tensors", f"{len(bank.slots) + len(new)}", f"{CAPACITY} at most")
            for key in new:
                bank.slots[key] = len(bank.slots)
                if key in self._waiting:
                    bank.set(key, self._waiting.pop(key))
            bank.columns[keys] = torch.tensor([bank.slots[key] for key in names], dtype=torch.int64, device=device)
        self._banks[device] = bank  # once its memory is written
        return bank

    def _error(self, what: str, got: str, expected: str) -> errors.Fp8StateError:
        where = f"fp8_state({self.name!r})" if self.name else "fp8_state()"
        fix = "load what state_dict() of the same model gave; two models of the same module paths need two fp8_state names"
        return errors.Fp8StateError(what, where=where, got=got[:200], expected=expected, fix=fix)


@contextlib.contextmanager
def _apart_from_callers(device: torch.device) -> Iterator[None]:
    """Work on a stream of its own that is done at the end: it waits for nothing that callers have begun."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


_COPIES = itertools.count()
_STATES: dict[str, Fp8State] = {}


def fp8_state(name: str = "") -> Fp8State:
    """What delayed scaling remembers on this rank, for models compiled with options={"fp8_state": name}."""
    return _STATES.get(name) or _STATES.setdefault(name, Fp8State(name))


@contextlib.contextmanager
def copied(name: str) -> Iterator[str]:
    """The name of a copy of a state, which is gone when this closes."""
    private = f"{name}, copy {next(_COPIES)}"
    fp8_state(private).load_state_dict(fp8_state(name).state_dict())
    try:
        yield private
    finally:
        _STATES.pop(private, None)


def text_of(name: str, keys: Iterable[str]) -> str:
    """How ops name a state and its keys."""
    return _SEPARATOR.join((name, *keys))


def _state_of(text: str) -> tuple[Fp8State, str]:
    name, _, keys = text.partition(_SEPARATOR)
    return fp8_state(name), keys


_LIBRARY = torch.library.Library("ub_overlap", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)


def fp8_seen(like: Tensor, keys: str) -> Tensor:
    """float32 [N] on the device of `like`; those memories are 0 then."""
    state, names = _state_of(keys)
    bank, columns = state.graph(names, like.device)
    seen = bank.seen.index_select(0, columns)
    bank.seen.index_fill_(0, columns, 0.0)
    return seen


def fp8_history(seen: Tensor, keys: str) -> Tensor:
    """seen [N], the same on all ranks that must have one scale -> the largest of each history [N], 0 for an empty one."""
    state, names = _state_of(keys)
    bank, columns = state.graph(names, seen.device)
    past = bank.past.index_select(1, columns)
    past = torch.where(seen > 0, torch.cat([seen[None], past[:-1]]), past)
    bank.past.index_copy_(1, columns, past)
    return past.amax(0)


def fp8_quantise(x: Tensor, most: Tensor, at: int, key: str, format: torch.dtype) -> tuple[Tensor, Tensor]:
    """x any shape, in 16 bits; most [N] -> (float8 of x's shape, contiguous; its scale [])."""
    state, name = _state_of(key)
    bank, slot = state.slot(name, x.device)
    noted = bank.seen[slot : slot + 1]
    if x.is_cuda and hasattr(torch.ops.ub_overlap, "fp8_cast"):  # csrc/cuda/quantise.cu: one pass over x
        return torch.ops.ub_overlap.fp8_cast.default(x, most, at, noted, format, HEADROOM)
    return cast_plainly(x, most, at, noted, format)


def cast_plainly(x: Tensor, most: Tensor, at: int, noted: Tensor, format: torch.dtype) -> tuple[Tensor, Tensor]:
    """What `fp8_quantise` does, in ATen: by most[at], into noted [1] what x is of magnitude."""
    largest = torch.finfo(format).max
    wide = x.float().contiguous()
    finite = wide.isfinite()
    seen = torch.where(finite, wide.abs(), 0.0).amax() if x.numel() else wide.new_zeros(())
    noted.copy_(torch.maximum(noted, seen))
    known = most[at]
    scale = (torch.where(known > 0, known * HEADROOM, seen) * (1.0 / largest)).clamp_min(TINY)
    bounded = (wide * scale.reciprocal()).clamp(-largest, largest)
    return torch.where(finite, bounded, torch.nan).to(format), scale


def _define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=_TAGS)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ub_overlap::{name}", fake, lib=_LIBRARY)


def _fake_seen(like: Tensor, keys: str) -> Tensor:
    return like.new_empty((keys.count(_SEPARATOR),), dtype=torch.float32)


def _fake_quantise(x: Tensor, most: Tensor, at: int, key: str, format: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=format), x.new_empty((), dtype=torch.float32)


_define("fp8_seen(Tensor like, str keys) -> Tensor", fp8_seen, _fake_seen)
_define("fp8_history(Tensor seen, str keys) -> Tensor", fp8_history, lambda seen, keys: torch.empty_like(seen))
_define(
    "fp8_quantise(Tensor x, Tensor most, int at, str key, ScalarType format) -> (Tensor q, Tensor scale)",
    fp8_quantise,
    _fake_quantise,
)
