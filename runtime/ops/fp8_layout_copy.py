"""fp8_layout_copy: copy a float8 view, a transpose for example, to contiguous memory.

    fp8_layout_copy(Tensor view) -> Tensor

It is `view.clone(memory_format=torch.contiguous_format)`. Inductor generates a kernel of its own for it
(compiler/inductor/op_lowerings.py). A plain clone would be fused into a kernel that reduces the rows of `view`'s base, whose
transposed stores are not coalesced.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .definition import define_python_op


def fp8_layout_copy(view: Tensor) -> Tensor:
    """Return the copy."""
    return view.clone(memory_format=torch.contiguous_format)


define_python_op("fp8_layout_copy(Tensor view) -> Tensor", fp8_layout_copy, fp8_layout_copy)
