"""Exchanges of rows by torch's all_to_all_vdev, in NVSHMEM's symmetric memory: a rival for eager layers.

Its splits stay on the device. The layer reads them on the host for all variants alike, since the experts need tensors of the
received rows. Buffers hold all rows of all ranks, for one rank may get everything.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor, nn

from .model import RoutedExperts


class Buffers:
    """Symmetric memory of the exchanges of one width. `rows`: the most that a rank gets."""

    def __init__(self, rows: int, width: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self.name = group.group_name
        self.sent, self.received = (self._make((rows, width), torch.bfloat16, device) for _ in range(2))
        self.splits = self._make((group.size(),), torch.int64, device)
        self.received_splits = self._make((2, group.size()), torch.int64, device)

    def _make(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        tensor = symm_mem.empty(shape, dtype=dtype, device=device)
        symm_mem.rendezvous(tensor, self.name)
        return tensor

    def exchange(self, rows: Tensor, sent: list[int], got: list[int]) -> Tensor:
        """Return the rows of all ranks for this one."""
        self.sent[: rows.shape[0]].copy_(rows)
        self.splits.copy_(torch.tensor(sent))
        torch.ops.symm_mem.all_to_all_vdev(self.sent, self.received, self.splits, self.received_splits, self.name)
        return self.received[: sum(got)].clone()


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, got: list[int], sent: list[int], buffers: Buffers) -> Tensor:  # type: ignore[override]
        ctx.got, ctx.sent, ctx.buffers = got, sent, buffers
        return buffers.exchange(rows, sent, got)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return ctx.buffers.exchange(gradient, ctx.got, ctx.sent), None, None, None


def use_symmetric_memory(model: nn.Module, rows: int) -> None:
    """Let the experts of `model` exchange their rows this way. RuntimeError where it is not possible."""
    if os.environ.get("NVSHMEM_DISABLE_NVLS") != "1":
        raise RuntimeError("NVSHMEM_DISABLE_NVLS=1 must be set: NVSHMEM uses multicast otherwise")
    if os.environ.get("TORCH_SYMMMEM") != "NVSHMEM":  # set_backend is refused: torch has used another one by then
        raise RuntimeError("TORCH_SYMMMEM=NVSHMEM must be set: torch takes other symmetric memory otherwise")
    if not symm_mem.is_nvshmem_available():
        raise RuntimeError("this torch has no NVSHMEM")
    if (backend := symm_mem.get_backend(torch.device("cuda"))) != "NVSHMEM":
        raise RuntimeError(f"torch's symmetric memory is that of {backend} in spite of TORCH_SYMMMEM=NVSHMEM")
    layers = [m for m in model.modules() if isinstance(m, RoutedExperts)]
    group = layers[0].group
    assert group is not None
    buffers = Buffers(rows, layers[0].up.shape[-1], group, layers[0].up.device)
    for layer in layers:
        layer.replacement = lambda rows, got, sent: _Exchange.apply(rows, got, sent, buffers)
