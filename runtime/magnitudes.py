"""What delayed scaling remembers: the largest finite magnitude of each quantised tensor in its last calls.

Legend: N tensors of a graph, H = LENGTH calls.

    forward begins   most, columns = fp8_history(weight, keys)    pushes what was seen into the histories [H]: their maxima [N]
                     most = all_reduce(most, max)                 where shards are gathered: one scale for all ranks
    tensor by tensor q, scale = fp8_quantise(x, most, columns, at, key, ..)    by most[at], and notes what it saw of x
    backward         the same, by the same `most` and `columns`

A call of a graph's forward that has gradients is a step: that of a microbatch too, on all ranks alike. Without gradients, and
where a checkpoint runs the forward again in backward, histories are read and not moved. A tensor that was not seen since the
last step keeps its history (backward may come later, or never).

An empty history means the scale of the current values. Where shards are gathered the ranks agree on them in the first call
(`agreed`); that it is the first is told by calls alone, not by what was loaded or reset, so that ranks cannot differ.

One graph may serve many modules (blocks that are compiled one by one): their weights tell them apart. The nth weight that comes
with a key has the history "key@n"; `columns` brings it to backward, which does not get the weight.

Nothing waits for the device, and memory keeps its address: the ops may be captured in CUDA graphs once they have run. What
fp8_quantise notes is a maximum, so running it again changes nothing; the results are copies.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ub_overlap import _torch_compat as compat

from . import errors
from .stream import ended
from .threads import apart

LENGTH = 16
"""Calls that a history remembers."""
CAPACITY = 8192
"""Tensors of a state on one device: memory that captured graphs write to cannot grow."""
HEADROOM = 2.0
"""By how much a tensor may grow over its history before it saturates: a binade of 18 (e4m3) or 32 (e5m2), and no bit."""
TINY = 2.0**-120
"""The least scale, as without delay (compiler/fp8/recipe.py)."""
NEUTRAL = 448.0
"""The magnitude that a gathered tensor is taken to have while all that was seen of it is 0: the same on all ranks."""
_SEPARATOR = ";"


class _Weights:
    """The weights that calls of one graph came with, numbered in the order of their first appearance. They are not kept alive,
    and the number of one that is gone goes to the next that is new: memory that was freed and made again is no other module."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._known: list[tuple[tuple[Any, ...], Any, int]] = []
        self._came = itertools.count()

    def find(self, weight: Tensor) -> tuple[int, int] | None:
        """(its number, how many weights had come before it)."""
        number = self._numbers.get((compat.storage_id(weight), weight.storage_offset()))
        if number is None or self._known[number][1].expired():  # another's memory, at the same place
            return None
        return number, self._known[number][2]

    def add(self, weight: Tensor) -> tuple[int, int]:
        """The same, of one that is not found."""
        entry = (compat.storage_id(weight), weight.storage_offset()), compat.weak_storage(weight), next(self._came)
        number = next((i for i, (_, ref, _) in enumerate(self._known) if ref.expired()), len(self._known))
        if number < len(self._known):
            self._numbers.pop(self._known[number][0], None)
            self._known[number] = entry
        else:
            self._known.append(entry)
        self._numbers[entry[0]] = number
        return number, entry[2]


@dataclass(slots=True, eq=False)
class _Bank:
    """A state's memory on one device: `seen` [CAPACITY], `past` [LENGTH, CAPACITY], newest first; `agreed` [CAPACITY], what the
    ranks found in a first call; `slots`: column by key."""

    seen: Tensor
    past: Tensor
    agreed: Tensor
    slots: dict[str, int] = field(default_factory=dict)
    weights: dict[str, _Weights] = field(default_factory=dict)
    """By the first key of a graph."""
    columns: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    """int64 [N] of a graph, by the text of its keys and the number of its weight."""
    modules: Counter[str] = field(default_factory=Counter)
    """How many modules a key is of."""
    met: set[tuple[str, str, int]] = field(default_factory=set)
    """First keys; keys, or all keys of a graph and a separator; weights, by the order in which these came."""
    came: Counter[str] = field(default_factory=Counter)
    """How many weights have come with a key so far: calls alone tell, not when a rank frees what it no longer uses."""
    agreements: weakref.WeakKeyDictionary[Any, Counter[str]] = field(default_factory=weakref.WeakKeyDictionary)
    """By process group (another may bear its name later) and key: for how many of them ranks have agreed."""
    begun: set[tuple[str, int]] = field(default_factory=set)
    """First keys of graphs and numbers of weights whose last forward outside backward was a step."""
    repeating: set[str] = field(default_factory=set)
    """Keys whose forward is being run again by a checkpoint."""

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
    a graph calls a module again and "@1", "@2" where one graph serves several modules. They outlive recompilation: graphs of
    one model share them.
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
                        self._waiting[key] = value.detach().to("cpu", copy=True)  # read by another stream, whenever

    def reset(self) -> None:
        """Forgets all histories, in place. What ranks agreed on in a first call stays: gathered tensors begin with that."""
        with self._lock, torch.no_grad():
            self._waiting.clear()
            for bank in self._banks.values():
                bank.seen.zero_()
                bank.past.zero_()

    def graph(self, keys: str, weight: Tensor) -> tuple[_Bank, int]:
        """The memory of a graph's tensors and the number of `weight`. `keys`: joined by ";"."""
        bank, first = self._banks.get(weight.device), keys.partition(_SEPARATOR)[0]
        found = bank.weights[first].find(weight) if bank is not None and first in bank.weights else None
        if bank is not None and found is not None and (first, keys + _SEPARATOR, found[1]) in bank.met:
            return bank, found[0]
        if _capturing(weight.device):
            if bank is not None and bank.modules[first] == 1 and (keys, 0) in bank.columns:
                return bank, 0  # the weight is a copy of the only one, which was made for the capture
            raise self._error("histories are made at the first call, and this one is being captured", keys, "a call before")
        return apart("ub_overlap fp8 state", lambda: self._add(keys, weight)).result()

    def bank(self, key: str, device: torch.device) -> _Bank:
        """Where `key` is, of which a graph has read the history."""
        bank = self._banks.get(device)
        if bank is None or key not in bank.slots:
            raise self._error(f"the history {key!r} was never read", str(device), "fp8_history before fp8_quantise")
        return bank

    def _add(self, keys: str, weight: Tensor) -> tuple[_Bank, int]:
        """Runs on a thread of its own: no mode of the caller's, and no memory pool of a graph that is being recorded."""
        plain, device = keys.split(_SEPARATOR), weight.device
        with self._lock, _apart_from_callers(device):
            bank = self._banks.get(device)
            if bank is None:
                agreed = torch.full((CAPACITY,), NEUTRAL, device=device)
                bank = _Bank(torch.zeros(CAPACITY, device=device), torch.zeros(LENGTH, CAPACITY, device=device), agreed)
            weights = bank.weights.setdefault(plain[0], _Weights())
            if (found := weights.find(weight)) is None:
                found = weights.add(weight)
                bank.begun.discard((plain[0], found[0]))
            number, coming = found
            names = [f"{key}@{number}" if number else key for key in plain]
            for home, other in self._banks.items():
                for key in names:
                    if home != device and key in other.slots:
                        raise self._error(f"the history {key!r} is on {home}", str(device), "one device a module")
            new = [key for key in names if key not in bank.slots]
            if len(bank.slots) + len(new) > CAPACITY:
                raise self._error("too many float8 tensors", f"{len(bank.slots) + len(new)}", f"{CAPACITY} at most")
            for key in new:
                bank.slots[key] = len(bank.slots)
                if key in self._waiting:
                    bank.set(key, self._waiting.pop(key))
            for key in plain:
                bank.modules[key] = max(bank.modules[key], number + 1)
                bank.came[key] += (plain[0], key, coming) not in bank.met
            bank.met.update((plain[0], key, coming) for key in (keys + _SEPARATOR, *plain))
            bank.columns[keys, number] = torch.tensor([bank.slots[key] for key in names], dtype=torch.int64, device=device)
        self._banks[device] = bank  # once its memory is written
        return bank, number

    def _error(self, what: str, got: str, expected: str) -> errors.Fp8StateError:
        where = f"fp8_state({self.name!r})" if self.name else "fp8_state()"
        fix = "load what state_dict() of the same model gave; two models of the same module paths need two fp8_state names"
        return errors.Fp8StateError(what, where=where, got=got[:200], expected=expected, fix=fix)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def _apart_from_callers(device: torch.device) -> Iterator[None]:
    """Work on a stream of its own that is done at the end: it waits for nothing that callers have begun."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield
        ended("making float8 histories")


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


def fp8_history(weight: Tensor, keys: str, step: bool) -> tuple[Tensor, Tensor]:
    """(float32 [N], the largest of each history, 0 for an empty one; int64 [N], their columns), of the module of `weight`.

    `step`: what was seen since the last step is pushed before, unless this is a forward that a checkpoint runs again."""
    state, names = _state_of(keys)
    bank, number = state.graph(names, weight)
    columns = bank.columns[names, number].clone()
    backward, module = compat.in_backward(), (names.partition(_SEPARATOR)[0], number)
    if not step and not backward:  # a reentrant checkpoint's: the forward in backward will be the step
        bank.begun.discard(module)
    if step:
        again = backward and module in bank.begun
        if again:
            bank.repeating.update(names.split(_SEPARATOR))
        else:
            if not backward:
                bank.begun.add(module)
            if bank.repeating:
                bank.repeating.difference_update(names.split(_SEPARATOR))
        step = not again
    past = bank.past.index_select(1, columns)
    if step:
        seen = bank.seen.index_select(0, columns)
        bank.seen.index_fill_(0, columns, 0.0)
        past = torch.where(seen > 0, torch.cat([seen[None], past[:-1]]), past)
        bank.past.index_copy_(1, columns, past)
    return past.amax(0), columns


def fp8_quantise(
    x: Tensor, most: Tensor, columns: Tensor, at: int, key: str, format: torch.dtype, notes: str, groups: str
) -> tuple[Tensor, Tensor]:
    """x any shape, in 16 bits; most, columns [N] -> (float8 of x's shape, contiguous; its scale []).

    `notes`: "forward" or "backward", where it is a cast of a step, else "never". `groups`: joined by ";", whose ranks need one
    scale; `most` is the same on them."""
    state, name = _state_of(key)
    bank = state.bank(name, x.device)
    # Of one module the host knows the column; of several it is told by `columns`, without waiting for them.
    alone = slice(bank.slots[name], bank.slots[name] + 1) if bank.modules[name] == 1 else None
    column = columns[at : at + 1]
    if groups:
        most, at = _known(bank, x, most[at : at + 1], column, alone, name, notes, groups), 0
    noting = notes == "backward" or (notes == "forward" and name not in bank.repeating)
    noted = bank.seen[alone] if noting and alone is not None else bank.seen.new_zeros(1)
    if x.is_cuda and hasattr(torch.ops.ub_overlap, "fp8_cast"):  # csrc/cuda/quantise.cu: one pass over x
        found = torch.ops.ub_overlap.fp8_cast.default(x, most, at, noted, format, HEADROOM)
    else:
        found = cast_plainly(x, most, at, noted, format)
    if noting and alone is None:
        bank.seen.scatter_reduce_(0, column, noted, "amax")
    return found


def _known(
    bank: _Bank, x: Tensor, most: Tensor, column: Tensor, alone: slice | None, key: str, notes: str, groups: str
) -> Tensor:
    """float32 [1], above 0 and the same on all ranks of `groups`: `most` [1], or what the ranks agreed on where that is 0.

    They agree in the first call of a key, and in every one where nothing is ever noted. Calls tell which: all ranks make the
    same ones."""
    members = [compat.group_of(group) for group in groups.split(_SEPARATOR)]
    agreements = bank.agreements.setdefault(members[0], Counter())
    if agreements[f"{key};{groups}"] < bank.came[key] and not _capturing(x.device):
        agreed = _largest(x.float()).reshape(1)
        for group in members:
            dist.all_reduce(agreed, dist.ReduceOp.MAX, group)
        agreed = torch.where(agreed > 0, agreed, NEUTRAL)
        bank.agreed.index_copy_(0, column, agreed)
        agreements[f"{key};{groups}"] += notes != "never"
    else:
        agreed = bank.agreed.index_select(0, column) if alone is None else bank.agreed[alone]
    return torch.where(most > 0, most, agreed * (1.0 / HEADROOM))  # current values take no headroom


def _largest(wide: Tensor) -> Tensor:
    """float32 []: of the finite magnitudes."""
    return torch.where(wide.isfinite(), wide.abs(), 0.0).amax() if wide.numel() else wide.new_zeros(())


def cast_plainly(x: Tensor, most: Tensor, at: int, noted: Tensor, format: torch.dtype) -> tuple[Tensor, Tensor]:
    """What `fp8_quantise` does, in ATen: by most[at], into noted [1] what x is of magnitude."""
    largest = torch.finfo(format).max
    wide = x.float().contiguous()
    finite, seen = wide.isfinite(), _largest(wide)
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


def _fake_history(weight: Tensor, keys: str, step: bool) -> tuple[Tensor, Tensor]:
    n = keys.count(_SEPARATOR)
    return weight.new_empty((n,), dtype=torch.float32), weight.new_empty((n,), dtype=torch.int64)


def _fake_quantise(
    x: Tensor, most: Tensor, columns: Tensor, at: int, key: str, format: torch.dtype, notes: str, groups: str
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=format), x.new_empty((), dtype=torch.float32)


_define("fp8_history(Tensor weight, str keys, bool step) -> (Tensor most, Tensor columns)", fp8_history, _fake_history)
_define(
    "fp8_quantise(Tensor x, Tensor most, Tensor columns, int at, str key, ScalarType format, str notes, str groups)"
    " -> (Tensor q, Tensor scale)",
    fp8_quantise,
    _fake_quantise,
)
