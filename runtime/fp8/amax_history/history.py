"""The histories of delayed scaling: their memory on a device, and the state that users save and load."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ... import errors
from ...session.daemon_thread import run_in_daemon_thread
from ...session.device_wait import wait_for_event
from .module_identity import Weights, made_for_capture

LENGTH = 16
"""Calls that a history remembers."""
CAPACITY = 8192
"""Tensors of a state on one device: memory that captured graphs write to cannot grow."""
NEUTRAL = 448.0
"""The magnitude that a gathered tensor is taken to have while all that was seen of it is 0: the same on all ranks."""
SEPARATOR = ";"
_FIX = "load what state_dict() of the same model gave; two models of the same module paths need two names of fp8 state"


@dataclass(slots=True, eq=False)
class AmaxHistory:
    """A state's memory on one device: `seen` [CAPACITY], `past` [LENGTH, CAPACITY], newest first; `agreed` [CAPACITY], what the
    ranks found in a first call; `slots`: column by key."""

    seen: Tensor
    past: Tensor
    agreed: Tensor
    slots: dict[str, int] = field(default_factory=dict)
    weights: dict[str, Weights] = field(default_factory=dict)
    """By key: graphs that have one in common number their modules alike."""
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
    """The histories of the models that compile with fp8={"state": name}, on this rank.

    Keys are "module path/x" (what a linear multiplies) and "module path/dy" (the gradient of its result), with "#1", "#2" where
    a graph calls a module again and "@1", "@2" where one graph serves several modules. They outlive recompilation: graphs of
    one model share them.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._banks: dict[torch.device, AmaxHistory] = {}
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

    def graph(self, keys: str, weight: Tensor) -> tuple[AmaxHistory, int]:
        """The memory of a graph's tensors and the number of `weight`. `keys`: joined by ";"."""
        bank, first = self._banks.get(weight.device), keys.partition(SEPARATOR)[0]
        found = bank.weights[first].find(weight) if bank is not None and first in bank.weights else None
        if bank is not None and found is not None and (first, keys + SEPARATOR, found[1]) in bank.met:
            return bank, found[0]
        if capturing(weight.device):
            if bank is not None and bank.modules[first] == 1 and (keys, 0) in bank.columns and made_for_capture(weight):
                return bank, 0  # a copy of the only one
            what = "histories are made at a module's first call, and this one is being captured"
            raise self._error(what, keys, "a call before", "call every module once before the capture")
        return run_in_daemon_thread("ub_overlap fp8 state", lambda: self._add(keys, weight)).result()

    def bank(self, key: str, device: torch.device) -> AmaxHistory:
        """Where `key` is, of which a graph has read the history."""
        bank = self._banks.get(device)
        if bank is None or key not in bank.slots:
            raise self._error(f"the history {key!r} was never read", str(device), "fp8_history before fp8_quantise")
        return bank

    def _add(self, keys: str, weight: Tensor) -> tuple[AmaxHistory, int]:
        """Runs on a thread of its own: no mode of the caller's, and no memory pool of a graph that is being recorded."""
        plain, device = keys.split(SEPARATOR), weight.device
        with self._lock, _apart_from_callers(device):
            bank = self._banks.get(device)
            if bank is None:
                agreed = torch.full((CAPACITY,), NEUTRAL, device=device)
                bank = AmaxHistory(torch.zeros(CAPACITY, device=device), torch.zeros(LENGTH, CAPACITY, device=device), agreed)
            weights = next((bank.weights[key] for key in plain if key in bank.weights), None) or Weights()
            for key in plain:
                bank.weights.setdefault(key, weights)
            if (found := weights.find(weight)) is None:
                found = weights.add(weight)
                gone = {(key, n) for key, n in bank.begun if n == found[0] and bank.weights.get(key) is weights}
                bank.begun.difference_update(gone)
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
            bank.met.update((plain[0], key, coming) for key in (keys + SEPARATOR, *plain))
            bank.columns[keys, number] = torch.tensor([bank.slots[key] for key in names], dtype=torch.int64, device=device)
        self._banks[device] = bank  # once its memory is written
        return bank, number

    def _error(self, what: str, got: str, expected: str, fix: str = _FIX) -> errors.Fp8StateError:
        where = f"fp8_state({self.name!r})" if self.name else "fp8_state()"
        return errors.Fp8StateError(what, where=where, got=got[:200], expected=expected, fix=fix)


def capturing(device: torch.device) -> bool:
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
        wait_for_event("making float8 histories")


_COPIES = itertools.count()
_STATES: dict[str, Fp8State] = {}


def fp8_state(name: str = "") -> Fp8State:
    """What delayed scaling remembers on this rank, for models compiled with options={"fp8": {"state": name}}."""
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
    return SEPARATOR.join((name, *keys))


def state_of(text: str) -> tuple[Fp8State, str]:
    name, _, keys = text.partition(SEPARATOR)
    return fp8_state(name), keys
