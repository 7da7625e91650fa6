"""The ops of amax histories: what is recorded, and when it leaves a history."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import ub_overlap
from tests.fp8.test_numerics import E4M3, E5M2
from ub_overlap.runtime.fp8.amax_history import LENGTH, Fp8State, join_keys
from ub_overlap.runtime.ops import load

load()
fp8_amax_history = torch.ops.ub_overlap.fp8_amax_history.default
fp8_record_amax = torch.ops.ub_overlap.fp8_record_amax.default
NUMBERS = itertools.count()


@pytest.fixture
def state() -> Fp8State:
    """A state that no other test has touched."""
    return ub_overlap.fp8_state(f"history{next(NUMBERS)}")


def test_histories_forget_and_skip(state: Fp8State) -> None:
    """A value leaves after LENGTH calls; a call that did not see a tensor pushes nothing; the largest of a step counts."""
    keys, like, one = join_keys(state.name, ["a", "b"]), torch.empty(1), torch.ones(())

    def call(a: float, b: float | None = None) -> Tensor:
        amax, at = fp8_amax_history(like, keys, True)
        for value in (a, a / 2):
            fp8_record_amax(one, None, torch.tensor(value), at, 0, join_keys(state.name, ["a"]), "forward")
        if b is not None:
            fp8_record_amax(one, None, torch.tensor(b), at, 1, join_keys(state.name, ["b"]), "backward")
        return amax

    assert call(8.0, 3.0).tolist() == [0.0, 0.0]
    for _ in range(LENGTH):
        assert call(1.0).tolist() == [8.0, 3.0]
    assert call(1.0).tolist() == [1.0, 3.0]


@pytest.mark.parametrize("format", [E4M3, E5M2])
def test_the_amax_of_a_cast_is_recorded(format: torch.dtype, state: Fp8State) -> None:
    """The largest finite element in units of the scale, or the sample's amax if that is larger."""
    keys, like, scale = join_keys(state.name, ["a", "b"]), torch.empty(1), torch.tensor(0.5)
    cast = torch.tensor([[1.0, -6.0, 3.0], [float("nan"), 0.0, 2.0]]).to(format)

    def record(quantized: Tensor, sample: float) -> float:
        fp8_record_amax(scale, quantized, torch.tensor(sample), at, 1, join_keys(state.name, ["b"]), "forward")
        return state.state_dict()["b"][0].item()

    _, at = fp8_amax_history(like, keys, True)
    assert record(cast, 0.0) == 3.0
    assert record(cast[1:], 2.5) == 3.0  # the maximum of a step
    assert record(cast.t(), 20.0) == 20.0
    assert record(cast[:0], 21.0) == 21.0
    assert record(torch.full((4,), float("nan")).to(format), 0.0) == 21.0
    assert state.state_dict()["a"][0] == 0
