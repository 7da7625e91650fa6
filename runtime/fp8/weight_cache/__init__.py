"""Weights in float8, cast anew only where they have changed: once a step, however many microbatches it has.

    forward    q, scale = fp8_weight(w)              is w what it was? (its bits are read) Else it is cast into q and scale
    backward   q, scale = fp8_weight(w, known)     what the forward cast, unread

What an optimizer, a checkpoint or a replayed CUDA graph writes shows in the bits themselves; nobody has to tell. On GPUs the
bits are summed up on the way to the largest magnitude, and the device decides (csrc/cuda/weights.cu): the host waits for
nothing, and calls may be captured. Elsewhere they are compared with a copy.

q and scale belong to the weight's memory and keep their address as long as that exists.

    kept.py    the casts that there are, by weight        cast.py    one cast, in ATen or by our kernels        ops.py    the op
"""

from __future__ import annotations

from .cache import kept_bytes as kept_bytes
from .weight_cast import cast_plainly as cast_plainly
