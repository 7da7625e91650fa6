"""fp8_layout_copy: copy a float8 view, a transpose for example, to contiguous memory.

    fp8_layout_copy(Tensor view) -> Tensor

It is `view.clone(memory_format=torch.contiguous_format)`, and Inductor does not fuse it. A kernel that reduces the rows of
`view`'s base would fuse a plain clone, and its transposed stores would not be coalesced. On GPUs a transposed matrix has a
kernel of ours (csrc/cuda/transpose.cu).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .definition import define_python_op


def fp8_layout_copy(view: Tensor) -> Tensor:
    """Return the copy."""
    return view.clone(memory_format=torch.contiguous_format)


def _fake(view: Tensor) -> Tensor:
    return torch.empty_like(view, memory_format=torch.contiguous_format)


define_python_op("fp8_layout_copy(Tensor view) -> Tensor", fp8_layout_copy, _fake)
