"""Cached casts of sibling weights, which lie next to each other so that packed operands need no copy."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.fp8.rank_fp8 import NO_ROWS
from tests.fp8.test_weight_cache import BF16, COLS, OP, casts, noise, same  # noqa: F401  (casts: a fixture)
from tests.models.compare import uncached
from ub_overlap.runtime.fp8.weight_cache import cache, cast_in_aten

PACKED = torch.ops.ub_overlap.fp8_packed_casts.default
ROWS = (48, 16, 32)


def weights() -> list[Tensor]:
    return [noise(rows, COLS, seed=rows) for rows in ROWS]


def cast_all(siblings: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return [OP(w, BF16, -1, None, False, list(siblings)) for w in siblings]


def packed(found: Sequence[tuple[Tensor, Tensor]], site: str = "test_sibling_casts/any") -> tuple[Tensor, Tensor]:
    q, scales = zip(*found, strict=True)
    return PACKED(list(q), list(scales), site)


def are_adjacent(found: Sequence[tuple[Tensor, Tensor]]) -> bool:
    pairs = [both for pair in pairwise(found) for both in zip(*pair, strict=True)]
    return all(a.data_ptr() + a.nbytes == b.data_ptr() for a, b in pairs)


def test_no_copy(casts: list[tuple[int, ...]]) -> None:  # noqa: F811
    """The joined cast is the memory of the casts, and that of the joined weights. A changed weight alone is cast again."""
    siblings = weights()
    for turn in range(3):
        found = cast_all(siblings)
        whole = packed(found)
        assert are_adjacent(found) and all(a.data_ptr() == b.data_ptr() for a, b in zip(whole, found[0], strict=True))
        assert same(whole, cast_in_aten(torch.cat(siblings), -1)) and len(casts) == 3 + turn
        siblings[turn].mul_(-1.5)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_any_sibling_may_be_first(first: int) -> None:
    siblings = weights()
    OP(siblings[first], BF16, -1, None, False, siblings)
    assert are_adjacent(cast_all(siblings))


def test_a_cast_that_exists_stays(caplog: pytest.LogCaptureFixture) -> None:
    """The casts then lie apart. They are copied, which is logged once."""
    siblings = weights()
    alone = OP(siblings[1], BF16, -1, None, False, [])
    found = cast_all(siblings)
    assert found[1][0].data_ptr() == alone[0].data_ptr() and not are_adjacent(found)
    for _ in range(2):
        whole = packed(found, "test_sibling_casts/apart")
        assert same(whole, cast_in_aten(torch.cat(siblings), -1)) and whole[0].data_ptr() != found[0][0].data_ptr()
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "Where: test_sibling_casts/apart. Got: 3 casts apart" in record.message


def test_a_weight_that_is_replaced_gets_memory_for_itself() -> None:
    """Memory for all siblings, of which one is used, would stay with each replacement."""
    siblings = weights()
    cast_all(siblings)
    for i, rows in enumerate(ROWS):
        siblings[i] = noise(rows, COLS, seed=100 + i)
        q, _ = OP(siblings[i], BF16, -1, None, False, siblings)
        assert q.untyped_storage().nbytes() == rows * COLS
    assert same(packed(cast_all(siblings)), cast_in_aten(torch.cat(siblings), -1))


def test_views_of_one_weight_as_siblings() -> None:
    """Both begin at one address. Each has the cast of its own rows."""
    whole = noise(32, COLS, seed=1)
    part = whole[:16]
    for weight in (part, whole):
        assert same(OP(weight, BF16, -1, None, False, [whole, part]), cast_in_aten(weight, -1))


@pytest.mark.tier("test")
def test_memory_goes_with_the_last_weight() -> None:
    gc.collect()
    siblings = weights()
    found = cast_all(siblings)
    memory = [StorageWeakRef(t.untyped_storage()) for t in found[0]]
    del found
    while siblings:
        assert not any(ref.expired() for ref in memory)
        siblings.pop()
        gc.collect()
    assert all(ref.expired() for ref in memory)


def test_threads() -> None:
    """Threads that cast different siblings first agree on one block."""
    with ThreadPoolExecutor(3) as pool:
        for turn in range(30):
            siblings = weights()
            list(pool.map(lambda w, s=siblings: OP(w, BF16, -1, None, False, s), siblings))
            found = cast_all(siblings)
            assert are_adjacent(found) and same(packed(found), cast_in_aten(torch.cat(siblings), -1)), turn


class Block(nn.Module):
    """Three linears of one input, one of them called twice, and one of another input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(COLS, rows, bias=False, dtype=BF16) for rows in (32, 16, 32))
        self.down = nn.Linear(32, COLS, bias=False, dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.a(x) * self.c(x)) + self.b(x).sum() + self.a(x + 1).sum()


@pytest.mark.tier("test")
@NO_ROWS
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_compiled(recipe: str) -> None:
    """Weights that multiply one value are siblings, in graphs with and without gradients. Tensorwise has none."""
    torch._dynamo.reset()
    block, x = Block(), noise(64, COLS).clamp(-4, 4)
    with uncached():
        run = torch.compile(block, backend="ub_overlap", options={"fp8": {"recipe": recipe}, "inner": "aot_eager"})
        with torch.no_grad():
            run(x)
        run(x).sum().backward()
    axis = -1 if recipe == "rowwise" else None
    cached = [cache.find(linear.weight, BF16, axis) for linear in (block.a, block.c, block.b, block.down)]
    found = [(c.q, c.scale) for c in cached if c is not None]
    assert len(found) == 4 and are_adjacent(found[:3]) == (recipe == "rowwise") and not are_adjacent(found[2:])
