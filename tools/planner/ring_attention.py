"""torch's ring attention, on CPU tensors too.

DTensor sends scaled_dot_product_attention to `_templated_ring_attention` for the kernels of GPUs only. Here the flash kernel of
the CPU is added to them. All else is torch's code, and so are its collectives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ub_overlap import _torch_compat as compat

aten = torch.ops.aten
_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
SEQ_DIM = 2


def _attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, dropout_p: float, scale: float | None) -> tuple[Tensor, Tensor]:
    return _FORWARD(q, k, v, dropout_p, is_causal, scale=scale)


def _attend_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    dropout_p: float,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _BACKWARD(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, scale=scale)


def _wrap(local: Tensor, like: DTensor) -> DTensor:
    """Return a DTensor of a result of this rank, sharded along the sequence as `like`."""
    shape = list(local.shape)
    shape[SEQ_DIM] *= like.device_mesh.size()
    stride = torch.empty(shape, device="meta").stride()
    meta = compat.TensorMeta(torch.Size(shape), stride, local.dtype)
    return DTensor(local, compat.DTensorSpec(like.device_mesh, (Shard(SEQ_DIM),), meta), requires_grad=False)


def _local(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value


def _forward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    q, k, v, *flags = args
    dropout_p, is_causal = (*flags, *(0.0, False)[len(flags) :])
    results = compat.context_attention._templated_ring_attention(
        q.device_mesh.get_group(), SEQ_DIM, _attend, *map(_local, (q, k, v)),
        is_causal=is_causal, dropout_p=dropout_p, scale=kwargs.get("scale"),
    )  # fmt: skip
    return tuple(_wrap(t, q) for t in results)


def _backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    grad_out, q, k, v, out, lse, dropout_p, is_causal = args
    results = compat.context_attention._templated_ring_attention_backward(
        q.device_mesh.get_group(), SEQ_DIM, _attend_backward, _local(grad_out), "grad_out", *map(_local, (q, k, v, out, lse)),
        is_causal, dropout_p=dropout_p, scale=kwargs.get("scale"),
    )  # fmt: skip
    return tuple(_wrap(t, q) for t in results)


@contextlib.contextmanager
def ring_attention(rotation: str = "allgather", load_balance: bool = False) -> Iterator[None]:
    """Send attention of sequence-sharded DTensors to torch's ring, also on the CPU. `rotation`: "allgather" or "alltoall".

    Compiled code needs it while it is traced, eager code in forward and backward.
    """
    cp = compat.context_attention
    before = dict(cp.custom_ops), cp._cp_options.enable_load_balance, cp._cp_options.rotate_method
    cp.custom_ops |= {_FORWARD: _forward, _BACKWARD: _backward}
    cp._cp_options.enable_load_balance = load_balance
    cp.set_rotate_method(rotation)
    cp._enable_context_parallel_dispatcher()
    try:
        yield
    finally:
        cp._disable_context_parallel_dispatcher()
        cp.custom_ops.clear()
        cp.custom_ops.update(before[0])
        cp._cp_options.enable_load_balance, cp._cp_options.rotate_method = before[1:]


def parallelize_attention(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard the query, key and value of `module` along the sequence, and return its result as a local tensor."""
    style = compat.context_attention._ContextParallel
    return style(SEQ_DIM, style.AttentionType.SDPA)._apply(module, mesh)
