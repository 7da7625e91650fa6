"""Packed float8 operands: siblings of the weight cache without a copy, and blocks against the same matmuls apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fp8.rank_packs import run_model, run_steps
from tests.gpu.cases import BF16
from tests.gpu.lockstep import Lockstep
from tests.gpu.torchrun.test_cached_weights import noise, same
from tests.models.case import on
from ub_overlap.runtime.fp8.weight_cache import cast_in_aten

ROWS = (1024, 256, 256, 16)
PACKED = torch.ops.ub_overlap.fp8_packed_casts.default


def casts(weights: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    found = [torch.ops.ub_overlap.fp8_cached_weight.default(w, BF16, -1, None, False, weights) for w in weights]
    return [q for q, _ in found], [scale for _, scale in found]


def siblings(lockstep: Lockstep, turns: int) -> str:
    """The joined cast is the memory of the casts. A changed sibling is seen, by eager calls and by replays."""
    weights = [noise(lockstep, rows, 512).to(BF16) for rows in ROWS]
    first, graph = PACKED(*casts(weights), "siblings"), None
    if lockstep.cuda:
        lockstep.sync()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = PACKED(*casts(weights), "siblings")
        assert found[0].data_ptr() == first[0].data_ptr(), "a replay reads the same memory"
    for turn in range(turns):
        weights[turn % len(weights)].mul_(-1.25)
        if graph is not None and turn % 2:
            graph.replay()
        else:
            found = PACKED(*casts(weights), "siblings")
        assert all(a.data_ptr() == b.data_ptr() for a, b in zip(found, first, strict=True)), f"turn {turn}: copied"
        assert all(map(same, found, cast_in_aten(torch.cat(weights), -1))), f"turn {turn}"
    return f"{turns} turns, bitwise"


def test_siblings(lockstep: Lockstep) -> None:
    lockstep.note(siblings(lockstep, 8 if lockstep.quick else 60))


@pytest.mark.deadline(150)
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_block(lockstep: Lockstep, group: str, inner: str) -> None:
    """Tensor cores add in another order for other widths, so a few elements are on the next float8 step."""
    options: dict[str, Any] = {"overlap": "force", "inner": inner, "fp8": {"recipe": "rowwise"}}
    variant = {"dtype": BF16, "kv_heads": 8, "length": 16 * lockstep.ranks}
    with on(lockstep.device):
        run = run_model(lockstep.rank, lockstep.ranks, "tests.models.dtensor_llama", variant, options)
    lockstep.sync()
    packs, in_float8 = [d.packs for d in run.gathers()], [d for d in run.gathers() if d.work and d.work.dtype == "float8"]
    assert run.worst < 0.05 and packs == [(3,), (2,)] and all(d.pack_bytes == 0 for d in in_float8), (run.worst, packs)
    lockstep.note(f"{packs}, {run.worst:.1e} apart, {len(run.differ)} tensors differ")


@pytest.mark.deadline(120)
def test_steps(lockstep: Lockstep, group: str) -> None:
    """Optimizer steps, microbatches, and weights that are swapped for a while."""
    options: dict[str, Any] = {"overlap": "force", "inner": "aot_eager", "fp8": {"recipe": "rowwise"}}
    with on(lockstep.device):
        run = run_steps(lockstep.rank, lockstep.ranks, options)
    lockstep.sync()
    assert run.worst < 0.05 and all(d.packs == (3,) for d in run.gathers()), run.worst
    lockstep.note(f"{run.worst:.1e} apart")
