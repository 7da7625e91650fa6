"""A whole training step of a case as one function of tensors: forward, loss, and backward, whose gradients are outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from tests.models.case import Case
from ub_overlap._torch_compat import reparametrize_module

Step = Callable[..., list[Tensor]]


def step_of(case: Case) -> tuple[Step, list[Tensor]]:
    """Return the step and its inputs: the local tensors of all parameters, then those of the case.

    The step returns the loss, and the gradient of each input.
    """
    named = dict(case.module.named_parameters())

    def local(t: Tensor) -> Tensor:
        return t.to_local() if isinstance(t, DTensor) else t

    def step(*flat: Tensor) -> list[Tensor]:
        leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in flat]
        state = dict(zip(named, map(_like, leaves, named.values()), strict=False))
        inputs = leaves[len(named) :]
        with reparametrize_module(case.module, state):
            loss = case.module(*inputs).square().mean()
        wanted = [*state.values(), *(x for x in inputs if x.requires_grad)]
        return [loss.detach(), *map(local, torch.autograd.grad(loss, wanted))]

    return step, [*(local(p).detach() for p in named.values()), *(x.detach() for x in case.inputs)]


def _like(tensor: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return tensor
    return DTensor.from_local(tensor, parameter.device_mesh, parameter.placements, run_check=False)


def trace(case: Case, **settings: Any) -> tuple[GraphModule, list[Tensor]]:
    """Return the traced step of `case`, and its inputs."""
    step, inputs = step_of(case)
    return make_fx(step, tracing_mode="fake", **settings)(*inputs), inputs
