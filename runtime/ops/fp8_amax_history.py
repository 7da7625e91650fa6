"""fp8_amax_history: read the amax histories of a graph's tensors, and advance them by a step.

    fp8_amax_history(Tensor weight, str keys, bool step) -> (Tensor amax, Tensor slots)

`weight` tells apart the modules that share a graph; its elements are not read. `keys`: "<state>;<key>;<key>..", N of them.
amax: float32 [N], the maximum of each history, 0 if it is empty. slots: int64 [N], where the histories lie.
`step`: first push the amax recorded since the last step, except in a forward that a checkpoint recomputes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ub_overlap import _torch_compat as compat

from ..fp8.amax_history.history import SEPARATOR, AmaxHistory, split_keys
from ..fp8.amax_history.history_update import advance
from .definition import define_python_op

SCHEMA = "fp8_amax_history(Tensor weight, str keys, bool step) -> (Tensor amax, Tensor slots)"


def fp8_amax_history(weight: Tensor, keys: str, step: bool) -> tuple[Tensor, Tensor]:
    """Return (amax [N], slots [N]) of the module that `weight` belongs to."""
    state, names = split_keys(keys)
    history, module = state.register(names, weight)
    slots = history.graph_slots[names, module].clone()
    is_step = _is_step(history, names, module, step)
    return advance(history.current, history.past, slots, is_step), slots


def _is_step(history: AmaxHistory, names: str, module: int, step: bool) -> bool:
    """Return whether this call advances the histories, and note recomputed forwards."""
    in_backward, graph = compat.in_backward(), (names.partition(SEPARATOR)[0], module)
    if not step and not in_backward:  # a reentrant checkpoint's forward: the forward in backward will be the step
        history.stepped.discard(graph)
    if not step:
        return False
    if in_backward and graph in history.stepped:
        history.recomputing.update(names.split(SEPARATOR))
        return False
    if not in_backward:
        history.stepped.add(graph)
    if history.recomputing:
        history.recomputing.difference_update(names.split(SEPARATOR))
    return True


def _fake(weight: Tensor, keys: str, step: bool) -> tuple[Tensor, Tensor]:
    n = keys.count(SEPARATOR)
    return weight.new_empty((n,), dtype=torch.float32), weight.new_empty((n,), dtype=torch.int64)


define_python_op(SCHEMA, fp8_amax_history, _fake)
