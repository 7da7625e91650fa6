"""Amax histories of delayed scaling: their memory on a device, and the state that users save and load."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ... import errors
from ...session.daemon_thread import run_in_daemon_thread
from ...session.device_wait import wait_for_event
from ..numerics import E4M3
from .module_identity import ModuleNumbers, is_capture_copy

LENGTH = 16
"""Calls in a history."""
CAPACITY = 8192
"""Tensors of a state on one device: memory that captured graphs write to cannot grow."""
NEUTRAL_AMAX = torch.finfo(E4M3).max
"""Assumed amax of a gathered tensor while all its values so far are 0: equal on all ranks."""
SEPARATOR = ";"
_FIX = "load the state_dict() of the same model; two models with equal module paths need two names of fp8 state"


@dataclass(slots=True, eq=False)
class AmaxHistory:
    """A state's memory on one device. Its columns are called slots; `slots` maps a key to its slot.

    C++ has what every call needs (csrc/bindings/ops/fp8_amax_history.cpp): the tensors, the slots of graphs that have been
    called, and which calls are steps."""

    current: Tensor
    """float32 [CAPACITY]: amax since the last step."""
    past: Tensor
    """float32 [LENGTH, CAPACITY]: amax of the last steps, newest first."""
    agreed_amax: Tensor
    """float32 [CAPACITY]: amax that the ranks agreed on in a first call."""
    slots: dict[str, int] = field(default_factory=dict)
    modules: dict[str, ModuleNumbers] = field(default_factory=dict)
    """By key. Graphs with a common key share the numbering of their modules."""
    graph_slots: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    """int64 [N]: the slots of a graph's tensors, by the text of its keys and the module number. C++ has them too."""
    module_counts: Counter[str] = field(default_factory=Counter)
    """Number of modules that share a key."""
    registered: set[tuple[str, str, int]] = field(default_factory=set)
    """(first key of a graph, key, arrival of the weight)."""
    arrivals: Counter[str] = field(default_factory=Counter)
    """Weights that have arrived with a key so far. Only calls count, so that ranks agree: they free weights at other times."""
    agreements: weakref.WeakKeyDictionary[Any, Counter[str]] = field(default_factory=weakref.WeakKeyDictionary)
    """Weights on whose first amax the ranks have agreed, by process group and key. A later group may reuse a name."""

    def read(self, key: str) -> Tensor:
        """Return float32 [1 + LENGTH]: the amax since the last step, then the history."""
        slot = self.slots[key]
        return torch.cat([self.current[slot : slot + 1], self.past[:, slot]])

    def write(self, key: str, value: Tensor) -> None:
        """Replace the amax and history that `read` returns."""
        slot = self.slots[key]
        self.current[slot].copy_(value[0])
        self.past[:, slot].copy_(value[1:])


class Fp8State:
    """The amax histories of the models compiled with fp8={"state": name}, on this rank.

    A key is "module path/x" (the input of a linear) or "module path/dy" (the gradient of its output). "#1", "#2" follow where
    a graph calls a module again, "@1", "@2" where one graph serves several modules. Histories outlive recompilation: the
    graphs of one model share them.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._histories: dict[torch.device, AmaxHistory] = {}
        self._unclaimed: dict[str, Tensor] = {}
        """Loaded values whose keys no graph has used yet."""
        self._lock = threading.Lock()

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy by key, float32 [1 + LENGTH]: the amax since the last call, then the amax of each call before it,
        newest first. Each rank saves its own."""
        with self._lock:
            unclaimed = {key: value.clone() for key, value in self._unclaimed.items()}
            return unclaimed | {key: history.read(key) for history in self._histories.values() for key in history.slots}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a result of `state_dict`.

        Before the first step, values wait until graphs use their keys. Later the keys must equal the existing ones.
        Fp8StateError names the first bad key, and nothing is loaded."""
        with self._lock:
            for key, value in state.items():
                if not isinstance(value, Tensor) or value.shape != (1 + LENGTH,) or value.dtype != torch.float32:
                    got = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                    raise self._error(f"the history {key!r} cannot be loaded", got, f"torch.float32 [{1 + LENGTH}]")
            owners = {key: history for history in self._histories.values() for key in history.slots}
            self._check_keys(state, owners.keys())
            with torch.no_grad():
                for key, value in state.items():
                    if key in owners:
                        owners[key].write(key, value)
                    else:  # copied: another stream may read it at any time
                        self._unclaimed[key] = value.detach().to("cpu", copy=True)

    def _check_keys(self, state: Mapping[str, Tensor], claimed: Collection[str]) -> None:
        existing = {*claimed, *self._unclaimed}
        missing, unknown = existing - state.keys(), state.keys() - existing
        for wrong, what in ((missing, "is missing from the loaded state"), (unknown, "belongs to no tensor")):
            if claimed and wrong:
                got, expected = f"{len(state)} keys", f"the {len(existing)} keys of state_dict()"
                raise self._error(f"the history {min(wrong)!r} {what}", got, expected)

    def reset(self) -> None:
        """Clear all histories, in place. The amax agreed on in a first call stays: gathered tensors start from it."""
        with self._lock, torch.no_grad():
            self._unclaimed.clear()
            for history in self._histories.values():
                history.current.zero_()
                history.past.zero_()

    def register(self, keys: str, weight: Tensor) -> int:
        """Return the module number of `weight`, and add the module if it is new. `keys`: those of a graph, joined by ";"."""
        if is_capturing(weight.device):
            history, first = self._histories.get(weight.device), keys.partition(SEPARATOR)[0]
            sole = history is not None and history.module_counts[first] == 1 and (keys, 0) in history.graph_slots
            if sole and is_capture_copy(weight):
                return 0  # a copy of the only module's weight
            what = "amax histories are allocated at a module's first call, and this first call is being captured"
            raise self._error(what, keys, "a call before the capture", "call every module once before the capture")
        return run_in_daemon_thread("ub_overlap fp8 state", lambda: self._add(keys, weight.detach())).result()

    def history_of(self, key: str, device: torch.device) -> AmaxHistory:
        """Return the memory that holds `key`. Fp8StateError unless a graph has read its history."""
        history = self._histories.get(device)
        if history is None or key not in history.slots:
            raise self._error(f"the history {key!r} was never read", str(device), "fp8_amax_history before it is recorded")
        return history

    def _add(self, keys: str, weight: Tensor) -> int:
        """Add a graph's keys. Runs on its own thread, outside the caller's modes and of the memory pool of a capture."""
        plain, device = keys.split(SEPARATOR), weight.device
        with self._lock, _on_own_stream(device):
            history = self._histories.get(device) or _allocate(device)
            number, arrival, reused = _module_of(history, plain, weight)
            names = [f"{key}@{number}" if number else key for key in plain]
            self._claim_slots(history, device, names)
            for key in plain:
                history.module_counts[key] = max(history.module_counts[key], number + 1)
                history.arrivals[key] += (plain[0], key, arrival) not in history.registered
            history.registered.update((plain[0], key, arrival) for key in plain)
            columns = [history.slots[key] for key in names]
            slots = history.graph_slots[keys, number] = torch.tensor(columns, dtype=torch.int64, device=device)
        self._histories[device] = history  # only after its memory is written
        memory = history.current, history.past, history.agreed_amax
        insert = torch.ops.ub_overlap.fp8_amax_history_insert.default
        insert(weight, join_keys(self.name, plain), number, slots, columns, *memory, reused)
        return number

    def _claim_slots(self, history: AmaxHistory, device: torch.device, names: list[str]) -> None:
        for other_device, other in self._histories.items():
            for key in names:
                if other_device != device and key in other.slots:
                    raise self._error(f"the history {key!r} is on {other_device}", str(device), "one device for each module")
        new = [key for key in names if key not in history.slots]
        if len(history.slots) + len(new) > CAPACITY:
            raise self._error("too many float8 tensors", f"{len(history.slots) + len(new)}", f"{CAPACITY} at most")
        for key in new:
            history.slots[key] = len(history.slots)
            if key in self._unclaimed:
                history.write(key, self._unclaimed.pop(key))

    def _error(self, what: str, got: str, expected: str, fix: str = _FIX) -> errors.Fp8StateError:
        where = f"fp8_state({self.name!r})" if self.name else "fp8_state()"
        return errors.Fp8StateError(what, where=where, got=got[:200], expected=expected, fix=fix)


def _allocate(device: torch.device) -> AmaxHistory:
    agreed_amax = torch.full((CAPACITY,), NEUTRAL_AMAX, device=device)
    return AmaxHistory(torch.zeros(CAPACITY, device=device), torch.zeros(LENGTH, CAPACITY, device=device), agreed_amax)


def _module_of(history: AmaxHistory, keys: list[str], weight: Tensor) -> tuple[int, int, list[str]]:
    """Return (module number, arrival) of `weight`; add it if it is new.

    Then also the first keys of graphs in which a freed weight may have had the number."""
    modules = next((history.modules[key] for key in keys if key in history.modules), None) or ModuleNumbers()
    for key in keys:
        history.modules.setdefault(key, modules)
    if (module := modules.find(weight)) is not None:
        return *module, []
    return *modules.add(weight), [key for key, numbers in history.modules.items() if numbers is modules]


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream of `device` is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def _on_own_stream(device: torch.device) -> Iterator[None]:
    """Run work on its own stream and wait for its end. It waits for nothing that callers have launched."""
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
    """Return the delayed-scaling state on this rank of models compiled with options={"fp8": {"state": name}}."""
    return _STATES.get(name) or _STATES.setdefault(name, Fp8State(name))


@contextlib.contextmanager
def copy_state(name: str) -> Iterator[str]:
    """Yield the name of a copy of a state. The copy is deleted on exit."""
    copy = f"{name}, copy {next(_COPIES)}"
    fp8_state(copy).load_state_dict(fp8_state(name).state_dict())
    try:
        yield copy
    finally:
        _STATES.pop(copy, None)
        torch.ops.ub_overlap.fp8_amax_history_evict.default(copy)


def join_keys(name: str, keys: Iterable[str]) -> str:
    """Return the text by which ops name a state and its keys."""
    return SEPARATOR.join((name, *keys))


def split_keys(text: str) -> tuple[Fp8State, str]:
    """Return the state named in such a text, and its keys, joined by ";"."""
    name, _, keys = text.partition(SEPARATOR)
    return fp8_state(name), keys
