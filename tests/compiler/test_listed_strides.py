"""Inductor keeps the order of strides of tensors that an op reads from a list."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.models.compare import uncached
from ub_overlap.compiler.inductor.op_lowerings import fix_listed_strides

pytestmark = pytest.mark.tier("test")

TAGS = (torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag)


def _two_numbers(x: Tensor, listed: list[Tensor]) -> Tensor:
    return x.new_empty(2, dtype=torch.int64)


@pytest.fixture
def strides_of() -> Iterator[torch._ops.OpOverload]:
    """An op that returns the strides of the first tensor of a list."""
    with torch.library._scoped_library("ub_overlap_tests", "FRAGMENT") as library:
        library.define("strides_of(Tensor x, Tensor[] listed) -> Tensor", tags=TAGS)
        library.impl("strides_of", lambda x, listed: torch.tensor(listed[0].stride()), "CPU")
        torch.library.register_fake("ub_overlap_tests::strides_of", _two_numbers, lib=library)
        yield torch.ops.ub_overlap_tests.strides_of.default


@pytest.mark.parametrize("by_name", [False, True])
def test_a_transposed_copy_stays_row_major(strides_of: torch._ops.OpOverload, by_name: bool) -> None:
    """torch 2.11 made it a view of the tensor that is copied."""
    fix_listed_strides(strides_of)

    def copied(x: Tensor) -> Tensor:
        copy = (x * 2).to(torch.float8_e5m2).t().clone(memory_format=torch.contiguous_format)
        return strides_of(x, listed=[copy]) if by_name else strides_of(x, [copy])

    torch._dynamo.reset()
    with uncached():
        assert torch.compile(copied)(torch.ones(96, 256)).tolist() == [96, 1]
