"""Delayed scaling: the amax of each quantized tensor in its last calls, where amax is the largest finite absolute value.

Legend: N tensors of a graph, H = LENGTH calls.

    forward begins    amax, slots = fp8_amax_history(weight, keys)    push the current amax into histories [H]; their maxima [N]
                      amax = all_reduce(amax, max)                    for gathered shards: one scale on all ranks
    for each tensor   q = cast by amax[i]: graph nodes, which Inductor fuses (compiler/fp8/state/delayed_scaling.py)
                      fp8_record_amax(scale, q, sample, slots, i)     raise the current amax to that of q and of a sample
    backward          the same, with the same `amax` and `slots`

Each call of a graph's forward with gradients is a step. A microbatch is a step too, on all ranks alike. Without gradients,
and in the forward that a checkpoint recomputes in backward, histories are read but not advanced. A tensor without a recorded
amax since the last step keeps its history: its backward may come later, or never.

While a history is empty, the scale comes from the current values. For gathered shards the ranks agree on that amax in the
first call (`fp8_first_amax`). Only the number of calls decides which call is the first. Loaded or reset histories do not, so
ranks cannot disagree.

One graph may serve several modules (blocks that are compiled one by one). Their weights distinguish them. The nth weight that
comes with a key has the history "key@n". `slots` carries that choice to backward, which does not receive the weight.

The host never waits for the device, and memory keeps its address. The ops can therefore be captured in CUDA graphs after a
first call. fp8_record_amax records a maximum, so running it again changes nothing. The results are copies.

    module_identity.py   which module a call belongs to       history.py   histories, their memory, the state dict
    runtime/ops/         the ops: fp8_amax_history.py, fp8_first_amax.py, fp8_record_amax.py
    csrc/bindings/ops/   what every call does: fp8_amax_history.cpp, fp8_history_update.cpp
"""

from __future__ import annotations

from .history import CAPACITY as CAPACITY
from .history import LENGTH as LENGTH
from .history import Fp8State as Fp8State
from .history import copy_state as copy_state
from .history import fp8_state as fp8_state
from .history import join_keys as join_keys
