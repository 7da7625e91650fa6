"""Copies and sums on one GPU, bit for bit, in every path of csrc/cuda/data.cu.

pytest tests/gpu/test_memory_kernels.py -m gpu
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu.conftest import gpus
from tests.harness.memory_kernels import DTYPES, compare_copy, compare_sum
from ub_overlap.runtime.extension import extension

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

# (blocks, elements, gap): one block, blocks of threads cut by the end, several blocks, narrow blocks, single elements.
SPANS = ((1, 1024, 0), (1, 5_000_008, 0), (3, 1_000_000, 64), (2048, 256, 768), (5, 37, 3), (70_000, 8, 8))


@pytest.fixture(autouse=True)
def _needs_gpu() -> None:
    if gpus() < 1:
        pytest.skip("no GPU")


@pytest.mark.parametrize("shift", [0, 8, 4, 2, 1])
@pytest.mark.parametrize(
    ("blocks", "size"), [(1, 16), (1, 40_000_000), (1, 4097), (3, 4_000_000), (4096, 512), (7, 13), (70_000, 16)]
)
def test_copy(blocks: int, size: int, shift: int) -> None:
    compare_copy("cuda", blocks, size, shift)


@pytest.mark.parametrize("sources", [1, 2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("dst", DTYPES)
@pytest.mark.parametrize("src", DTYPES)
def test_sum(src: torch.dtype, dst: torch.dtype, sources: int) -> None:
    for blocks, elements, gap in SPANS:
        compare_sum("cuda", src, dst, sources, blocks=blocks, elements=elements, gap=gap)


def test_average() -> None:
    for divisor in (2.0, 3.0, 8.0):
        compare_sum("cuda", torch.bfloat16, torch.bfloat16, 8, blocks=1, elements=4096, divisor=divisor)


def test_under_capture() -> None:
    """The first launch of a kernel may happen while a stream is captured: its limits are looked up then."""
    graph = torch.cuda.CUDAGraph()
    src = torch.randn(1 << 20, device="cuda").bfloat16()
    out = torch.zeros_like(src)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        stream = torch.cuda.current_stream().cuda_stream
        parts = [(src.data_ptr(), 2 << 20)] * 2
        extension().testing.run_sum(parts, "bfloat16", out.data_ptr(), 2 << 20, "bfloat16", 1, 1 << 20, 1.0, stream)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, src + src)
