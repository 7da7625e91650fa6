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

    weights.py    which module a call is of          state.py    histories, their memory, the state dict
    agreement.py  what ranks agree on in first calls  cast.py    one cast, in ATen or by our kernel         ops.py    the ops
"""

from __future__ import annotations

from .delayed_cast import cast_plainly as cast_plainly
from .history import CAPACITY as CAPACITY
from .history import LENGTH as LENGTH
from .history import Fp8State as Fp8State
from .history import copied as copied
from .history import fp8_state as fp8_state
from .history import text_of as text_of
