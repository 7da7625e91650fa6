"""What is prefetched of a matmul's right operand: its first part, in whole cache lines, within the limit."""

from __future__ import annotations

import pytest
import torch

from ub_overlap.runtime.ops import extension

LINE = 128


def part_of(operand: torch.Tensor, limit: int, offset: int = 0) -> tuple[int, int, int, int]:
    """Return (runs, stride, bytes of a run, cache lines). `offset`: of the data from the begin of a line."""
    item = operand.element_size()
    strides = [stride * item for stride in operand.stride()]
    parts = extension().testing.first_parts([(LINE + offset, *operand.shape, *strides, item)], limit)  # type: ignore[list-item]
    if not parts:
        return 0, 0, 0, 0
    (((address, *run), lines),) = parts
    assert address == LINE + offset and lines
    return (*run, lines)  # type: ignore[return-value]


BF16 = torch.bfloat16


def test_a_linear_weight_gives_the_first_part_of_all_its_rows() -> None:
    """Of each row [K] as many lines, and no element twice."""
    weight = torch.empty(96, 1024, dtype=BF16).t()
    assert part_of(weight, 96 * 3 * LINE) == (96, 2048, 3 * LINE, 96 * 3)
    assert part_of(weight, 96 * 4 * LINE - 1) == (96, 2048, 3 * LINE, 96 * 3)
    assert part_of(weight, 1 << 30) == (96, 2048, 2048, 96 * 16)


def test_rows_without_gaps_are_one_run() -> None:
    assert part_of(torch.empty(1024, 16, dtype=BF16), 1000 * LINE) == (1, 0, 1024 * 32, 256)
    assert part_of(torch.empty(1024, 16, dtype=BF16), 7 * LINE) == (1, 0, 7 * LINE, 7)
    assert part_of(torch.empty(1024, 1, dtype=BF16), 1 << 20) == (1, 0, 2048, 16)


def test_rows_with_gaps() -> None:
    assert part_of(torch.empty(50, 128, dtype=BF16)[:, :64], 20 * LINE) == (20, 256, LINE, 20)


@pytest.mark.parametrize("offset", [2, 64])
def test_runs_that_begin_within_a_line_touch_one_more(offset: int) -> None:
    weight = torch.empty(10, 512, dtype=BF16).t()
    assert part_of(weight, 10 * 3 * LINE, offset) == (10, 1024, 2 * LINE, 10 * 3)
    assert part_of(torch.empty(512, 64, dtype=BF16), 5 * LINE, offset) == (1, 0, 4 * LINE, 5)


@pytest.mark.parametrize("limit", [-LINE, 0, 1, LINE - 1, 95 * LINE])
def test_nothing_where_a_line_of_each_row_is_too_much(limit: int) -> None:
    assert part_of(torch.empty(96, 1024, dtype=torch.float8_e4m3fn).t(), limit)[3] == 0


@pytest.mark.parametrize("sizes", [(0, 8), (8, 0)])
def test_empty_operands(sizes: tuple[int, int]) -> None:
    assert part_of(torch.empty(sizes), 1 << 20) == (0, 0, 0, 0)


def test_random_operands_stay_within_the_limit_and_the_operand() -> None:
    draw = torch.Generator().manual_seed(0)

    def number(most: int) -> int:
        return int(torch.randint(1, most, (), generator=draw))

    for _ in range(500):
        rows, cols, gap, limit = number(300), number(300), number(4) - 1, number(1 << 18)
        operand = torch.empty(rows, cols + gap, dtype=BF16)[:, :cols]
        operand = operand.t() if number(3) == 1 else operand
        runs, stride, bytes, lines = part_of(operand, limit, 16 * (number(8) - 1))
        span = ((operand.shape[0] - 1) * operand.stride(0) + (operand.shape[1] - 1) * operand.stride(1) + 1) * 2
        assert (runs - 1) * stride + bytes <= max(span, 0) or not lines
        assert runs * -(-bytes // LINE) <= lines and lines * LINE <= limit
