"""Identify the module of a call of a shared graph: during captures, and with different graphs of the same modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.fp8.test_numerics import K, inputs
from tests.models.compare import uncached
from ub_overlap.runtime import errors
from ub_overlap.runtime.fp8.amax_history import fp8_state, join_keys
from ub_overlap.runtime.fp8.amax_history import history as state_module
from ub_overlap.runtime.ops import load

load()
fp8_amax_history = torch.ops.ub_overlap.fp8_amax_history.default
SHARED, OF_THE_GRAPH = (0, 0), (0, 7)


def column(weight: Tensor, name: str, *keys: str) -> int:
    return int(fp8_amax_history(weight, join_keys(name, keys), True)[1][0])


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """captured(*weights): from here on a CUDA graph is being captured, and `weights` lie in the memory that all share. What
    else is there, and what is allocated, is of the graph."""

    def begin(*weights: Tensor) -> None:
        own = [
            {"address": w.data_ptr(), "total_size": w.untyped_storage().nbytes(), "segment_pool_id": SHARED} for w in weights
        ]
        rest = {"address": 0, "total_size": 1 << 62, "segment_pool_id": OF_THE_GRAPH}
        monkeypatch.setattr(state_module, "is_capturing", lambda device: True)
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [*own, rest])

    return begin


def test_a_copy_made_for_a_capture_is_the_only_module(captured: Callable[..., None]) -> None:
    weight, copy = torch.ones(8), torch.ones(8)
    before = column(weight, "copied for a capture", "x")
    captured(weight)
    assert column(copy, "copied for a capture", "x") == column(weight, "copied for a capture", "x") == before


def test_a_module_that_is_captured_first_is_refused(captured: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take the history of the one that came before it."""
    one, other = torch.ones(8), torch.ones(8)
    column(one, "second module", "x")
    captured(one, other)
    with pytest.raises(errors.Fp8StateError, match="call every module once before the capture"):
        column(other, "second module", "x")

    def refuses() -> list[dict[str, Any]]:
        raise RuntimeError("the allocator keeps no books")

    monkeypatch.setattr(torch.cuda, "memory_snapshot", refuses)
    with pytest.raises(errors.Fp8StateError, match="first call"):
        column(other, "second module", "x")


def test_a_copy_of_one_of_two_is_refused(captured: Callable[..., None]) -> None:
    weights = torch.ones(8), torch.ones(8)
    for weight in weights:
        column(weight, "two modules", "x")
    captured(*weights)
    with pytest.raises(errors.Fp8StateError, match="call every module once"):
        column(torch.ones(8), "two modules", "x")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(K, K, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


@pytest.mark.tier("test")
def test_blocks_are_numbered_alike_by_all_their_graphs() -> None:
    """A graph whose first linear stays in 16 bits, called in another order, finds each block's histories."""
    torch._dynamo.reset()
    torch.manual_seed(5)
    blocks = [Block().bfloat16() for _ in range(3)]
    options: dict[str, Any] = {"fp8": {"recipe": "delayed", "state": "alike"}, "inner": "aot_eager"}
    with uncached(), torch.no_grad():
        seen = [float(torch.relu(b.first(inputs("normal") * 4**n)).abs().max()) for n, b in enumerate(blocks)]

    def step(n: int) -> None:
        blocks[n](inputs("normal") * 4**n).sum().backward()

    with uncached():
        for fp8_filter, order in ((None, (0, 1, 2)), (lambda module, shape: "first" not in module, (2, 0, 1))):
            torch._dynamo.reset()
            for block in blocks:
                block.compile(backend="ub_overlap", options={**options, "fp8": {**options["fp8"], "filter": fp8_filter}})
            for n in order:
                step(n)
    state = fp8_state("alike").state_dict()
    of_second = {key: value for key, value in state.items() if "second/x" in key}
    assert sorted(key.partition("@")[2] for key in of_second) == ["", "1", "2"], sorted(state)
    for key, value in of_second.items():  # now, and in the call before
        amax = seen[int(key.partition("@")[2] or 0)]
        assert value[:2].tolist() == pytest.approx([amax] * 2, rel=0.1), (key, value[:3], seen)
