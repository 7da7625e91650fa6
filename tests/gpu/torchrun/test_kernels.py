"""Run every kernel of csrc/cuda once on tiny shapes, over gloo alone. tests/gpu/test_sanitizer.py runs this module."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.gpu import cases
from tests.gpu.cases import BF16, BOTH_T, F16, F32, GATHERED_T, OUT_T, PLAIN, Case, Maker
from tests.gpu.lockstep import Lockstep
from ub_overlap.runtime import errors
from ub_overlap.runtime.session import session

# Odd sizes take the kernels' narrow paths, even ones the 16-byte ones.
CASES: dict[str, Callable[[Maker], tuple[Case, str]]] = {
    "gather, even": lambda m: (m.gather(BF16, 1, 16, 32, [PLAIN, GATHERED_T], False, True), "pipelined"),
    "gather, odd, all transposes": lambda m: (
        m.gather(F32, 3, 3, 5, [PLAIN, OUT_T, GATHERED_T, BOTH_T], False, True),
        "pipelined:chunks=5",
    ),
    "gather, last": lambda m: (m.gather(F16, 1, 5, 6, [PLAIN, GATHERED_T], True, True), "pipelined"),
    "scatter, even": lambda m: (m.scatter(BF16, 1, 16, 32), "pipelined:chunks=4"),
    "scatter, stripes": lambda m: (m.scatter(BF16, 1, 16, 32), "pipelined:stripes=3"),
    "scatter, direct": lambda m: (m.scatter(BF16, 1, 16, 32), "direct"),
    "scatter, direct, blocks, bias": lambda m: (m.scatter(BF16, 3, 16, 32, bias=True), "direct"),
    "scatter, direct, odd": lambda m: (m.scatter(BF16, 1, 3, 5), "direct"),
    "all_reduce, direct, odd": lambda m: (m.reduce(BF16, 13, 7, 8), "direct"),
    "scatter, odd, out fp32": lambda m: (m.scatter(BF16, 3, 3, 5, out_dtype=F32), "pipelined"),
    "scatter, last, avg": lambda m: (m.scatter(F16, 1, 5, 6, last=True, by="avg"), "pipelined"),
    "scatter, fp32": lambda m: (m.scatter(F32, 1, 8, 16, out_dtype=BF16), "pipelined"),
    "all_reduce, odd": lambda m: (m.reduce(BF16, 13, 7, 8), "pipelined"),
    "bulk gather": lambda m: (m.bulk(BF16, "all_gather", 6, 10), "bulk"),
    "bulk scatter": lambda m: (m.bulk(F32, "reduce_scatter", 6 * m.ranks, 8), "bulk"),
    "bulk scatter, out fp32": lambda m: (m.bulk(BF16, "reduce_scatter", 6 * m.ranks, 8, out_dtype=F32), "bulk"),
    "bulk reduce, odd, out fp32": lambda m: (m.bulk(BF16, "all_reduce", 7, 9, out_dtype=F32), "bulk"),
    "bulk reduce": lambda m: (m.bulk(F16, "all_reduce", 7, 9), "bulk"),
}


@pytest.mark.deadline(200)
@pytest.mark.parametrize("what", CASES)
def test_kernels_of(lockstep: Lockstep, group: str, what: str) -> None:
    case, strategy = CASES[what](Maker(lockstep.device, lockstep.ranks))
    for _ in range(3):
        outs = cases.run_op(case, strategy, group, f"sanitize.{what}")
    lockstep.sync()
    session.check(group)
    assert all(bool(out.isfinite().all()) for out in outs), "outputs are not finite"


@pytest.mark.deadline(200)
def test_a_failed_call_fills_its_outputs_with_nan(lockstep: Lockstep, own_group: str) -> None:
    """Rank 1 is at another site."""
    case, strategy = CASES["gather, even"](Maker(lockstep.device, lockstep.ranks))
    outs: list[torch.Tensor] = []
    try:
        outs = cases.run_op(case, strategy, own_group, f"sanitize.site{min(lockstep.rank, 1)}")
        lockstep.sync()
        session.check(own_group)
    except errors.SiteMismatchError:
        lockstep.sync()
    else:
        raise AssertionError("no SiteMismatchError")
    assert not lockstep.cuda or all(bool(out.isnan().all()) for out in outs), "the outputs are not NaN"
