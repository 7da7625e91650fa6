"""Cache of weights in float8: a weight is cast again only when its elements have changed, so once a step.

    forward    q, scale = fp8_cached_weight(w)                  cast w if its bits differ from those of the cached cast
    backward   q, scale = fp8_cached_weight(w, reuse_forward)   the forward's cast; w is not read
               fp8_cached_weight_transposed(w, q)               its transposed copy, which casts write too from then on

The bits themselves show what an optimizer, a checkpoint or a replayed CUDA graph has written. No caller has to invalidate
anything. On GPUs a checksum of the bits is computed in the pass that computes the amax, and the device decides
(csrc/cuda/fp8_cached_weight.cu). The host does not wait, so calls can be captured. On other devices the bits are compared with
a copy.

When backward may reuse the forward's cast is one rule, csrc/core/forward_uses.h, which both caches use.

q and scale live as long as the weight's memory and keep their addresses.

    cache.py         cached weights by storage, for devices without our kernels (C++ holds those of CUDA)
    weight_cast.py   one cast, in ATen or by our kernels
    runtime/ops/     the op: fp8_cached_weight.py
"""

from __future__ import annotations

from .weight_cast import cast_in_aten as cast_in_aten
