"""Helpers that run on the ranks: compile a case or a function, and return the plans of the compiler."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness.ranks import RankPool
from tests.harness.traces import as_loss
from tests.models.case import Case
from tests.models.compare import Comparison, compare, uncached
from ub_overlap.compiler.plan.decision import Decision
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.reports.history import HISTORY

FORCE: dict[str, Any] = {"overlap": "force", "inner": "aot_eager"}
FUSED: dict[str, Any] = {**FORCE, "split": "off"}
"""What has no matmul is left alone, with the reason."""
INDUCTOR: dict[str, Any] = {"overlap": "force"}


def world_name() -> Any:
    """Return the name of the group of all ranks."""
    group = dist.group.WORLD
    assert group is not None
    return group.group_name


def since(release: tuple[int, int], why: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test on an older torch and states the reason."""
    found = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return pytest.mark.skipif(found < release, reason=f"torch {torch.__version__}: {why}")


def build(rank: int, world: int, module: str, variant: Mapping[str, Any]) -> Case:
    return importlib.import_module(module).build(rank, world, **variant)


def plans_of(
    function: Callable[..., Any], inputs: tuple[Any, ...], options: Mapping[str, Any] = FORCE, dynamic: bool | None = None
) -> list[Plan]:
    """Return the plans of one forward, and of its backward if the loss requires a gradient."""
    mark = HISTORY.mark()
    with uncached():
        compiled = torch.compile(function, backend="ub_overlap", options=dict(options), dynamic=dynamic)
        loss = as_loss(compiled(*inputs))
        if isinstance(loss, Tensor) and loss.requires_grad:
            loss.backward()
    return HISTORY.since(mark)


def decisions_of(
    function: Callable[..., Any], inputs: tuple[Any, ...], options: Mapping[str, Any] = FORCE, dynamic: bool | None = None
) -> list[Decision]:
    return [d for plan in plans_of(function, inputs, options, dynamic) for d in plan.decisions]


def check(
    pool: RankPool, module: str, variant: Mapping[str, Any], options: Mapping[str, Any], timeout: float = 240.0
) -> list[Comparison]:
    """Check results and sites on every rank, and return the outcomes by rank."""
    outcomes: list[Comparison] = pool.run(compare, module, dict(variant), dict(options), timeout=timeout)
    for outcome in outcomes:
        outcome.check()
        outcome.check_sites()
    return outcomes


@contextlib.contextmanager
def saved_sizes() -> Any:
    """Record the element counts of tensors saved for backward inside this context."""
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes
