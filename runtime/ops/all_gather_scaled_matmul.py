"""all_gather_scaled_matmul: gather a float8 shard over the group and multiply the gathered matrix by each float8 operand.

Legend: R ranks of the group; o outer blocks; m rows of a shard in each block; Q columns. float8 is float8_e4m3fn or
float8_e5m2.

G is gathered as by all_gather_matmul with shard_dim_is_last=False, and is float8.

    outs[j] [rows(G), N_j] = (G @ operands[j]) * scales (+ biases[j])

outs[j] has out_dtypes[j]: fp32, bf16 or fp16. biases[j] is None or [N_j] of that dtype. Scales are float32 and
multiply: a float8 number q stands for q * scale. The operands' scales select the granularity:

    scaling   shard_scale                            operand_scales[j]   gathered_scale
    tensor    one element, equal on all ranks        one element         empty [0]
              (not checked)
    row       [o * m, 1]; it travels with the        [1, N_j]            [rows(G), 1] if return_gathered, else empty [0]
              rows, under the same flag

Where each rank has one scale of its own, use row scaling with the scale expanded to the shard's rows.

Limits of a float8 product: Q and N_j divide by 16; the shard is row-major and operands are column-major (the
transposed view of a contiguous [N, K]); at least one side is e4m3. Anything else raises OptionError. `fast_accum`: as
in torch._scaled_mm (CUDA: fewer bits in the tensor cores' sums). The CPU multiplies in fp32, scales, adds the bias,
and rounds once. On CUDA, cuBLASLt has no fp32 bias and, before 12.9, no row scaling; torch._scaled_mm multiplies
there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ub_overlap import _torch_compat as compat

from . import c10d_fallback as c10d
from . import flop_counts
from .definition import OpDefinition

SCHEMA = (
    "all_gather_scaled_matmul(Tensor shard, Tensor shard_scale, Tensor[] operands, Tensor[] operand_scales, Tensor?[] biases, "
    "SymInt outer, bool return_gathered, ScalarType[] out_dtypes, bool fast_accum, str strategy, str group, str site)"
    " -> (Tensor gathered, Tensor gathered_scale, Tensor[] outs)"
)


class AllGatherScaledMatmulArgs(NamedTuple):
    shard: Tensor
    shard_scale: Tensor
    operands: Sequence[Tensor]
    operand_scales: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    outer: int
    return_gathered: bool
    out_dtypes: Sequence[torch.dtype]
    fast_accum: bool
    strategy: str
    group: str
    site: str

    @property
    def has_row_scales(self) -> bool:
        return (self.operand_scales[0] if self.operands else self.shard_scale).numel() != 1


def fake(a: AllGatherScaledMatmulArgs) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return empty results of the right sizes."""
    rows: Any = c10d.group_size(a.group) * c10d.leading_rows(a.shard)
    outs = []
    for operand, dtype in zip(a.operands, a.out_dtypes, strict=True):
        compat.check(operand.shape[0] == a.shard.shape[-1], lambda: "an operand does not fit the gathered matrix")
        outs.append(a.shard.new_empty((rows, operand.shape[1]), dtype=dtype))
    scale_sizes = (rows, 1) if a.return_gathered and a.has_row_scales else (0,)
    gathered = a.shard.new_empty((rows, a.shard.shape[-1]) if a.return_gathered else (0,))
    return gathered, a.shard.new_empty(scale_sizes, dtype=torch.float32), outs


def fallback(a: AllGatherScaledMatmulArgs) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Gather rows and row scales with c10d, then multiply."""
    gathered, scale = c10d.gather_rows(a.shard, a.outer, a.group), a.shard_scale
    if a.has_row_scales:
        scale = c10d.gather_rows(scale.reshape(-1, 1), a.outer, a.group)
    outs = [
        c10d.scaled_matmul(gathered, operand, scale, operand_scale, bias, dtype, a.fast_accum)
        for operand, operand_scale, bias, dtype in zip(a.operands, a.operand_scales, a.biases, a.out_dtypes, strict=True)
    ]
    gathered_scale = scale if a.return_gathered and a.has_row_scales else scale.new_empty(0)
    return (gathered.contiguous() if a.return_gathered else a.shard.new_empty(0)), gathered_scale, outs


def flops(a: AllGatherScaledMatmulArgs) -> Any:
    """Return the operations of the matmuls."""
    return flop_counts.count_gathered(a.shard, a.operands, a.group)


DEFINITION = OpDefinition(SCHEMA, AllGatherScaledMatmulArgs, fake, fallback, flops)
