"""The kernel of fused collectives with itself as its peers, as benchmarks.fused_kernel times it: results are right."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.conftest import gpus

SHAPES = [(2, 1, 4096), (2, 16, 8192), (2, 64, 8192), (2, 3, 2560), (8, 1, 8192), (8, 16, 4096), (3, 5, 4096)]
"""(ranks, rows, columns): in packets and in regions, in clusters of 1 to 8 blocks."""


@pytest.mark.gpu
@pytest.mark.timeout(100)
def test_results() -> None:
    if gpus() < 1:
        pytest.skip("no GPU")
    from benchmarks.fused_kernel.__main__ import Row

    for ranks, rows, cols in SHAPES:
        row = Row(torch.device("cuda", 0), ranks, rows, cols)
        for _ in range(3):  # other numbers in every epoch: those of an epoch before would be seen
            row.x.normal_()
            row.residual.normal_()
            row.check()
        row.summed.fill_(float("nan"))
        row.sum()
        expected = row.x.double() * ranks
        assert float((row.summed.double() - expected).norm() / expected.norm()) < 1e-2, (ranks, rows, cols)
        torch.cuda.synchronize()
        assert not row.group.has_failed()
