"""Compare the executors' copies and sums with torch, bit for bit: on the CPU, and on GPUs in tests/gpu."""

from __future__ import annotations

import torch

from ub_overlap.runtime.extension import extension

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _stream(device: str) -> int | None:
    return torch.cuda.current_stream().cuda_stream if device != "cpu" else None


def compare_copy(device: str, blocks: int, bytes_per_block: int, shift: int = 0) -> None:
    """Copy `blocks` runs that lie `shift` bytes behind aligned addresses, with gaps that must stay as they are."""
    gap = 64
    src = torch.randint(0, 256, (blocks, bytes_per_block + gap), dtype=torch.uint8, device=device)
    dst = torch.zeros(blocks, bytes_per_block + 2 * gap, dtype=torch.uint8, device=device)
    expected = dst.clone()
    expected[:, shift : shift + bytes_per_block] = src[:, shift : shift + bytes_per_block]
    extension().testing.run_copy(
        src.data_ptr() + shift, src.stride(0), dst.data_ptr() + shift, dst.stride(0), blocks, bytes_per_block, _stream(device)
    )
    assert torch.equal(dst, expected), (device, blocks, bytes_per_block, shift)


def compare_sum(
    device: str,
    src: torch.dtype,
    dst: torch.dtype,
    sources: int,
    *,
    blocks: int,
    elements: int,
    divisor: float = 1.0,
    gap: int = 0,
) -> None:
    """Sum in fp32 in the order of the sources, divide, and round once. `gap`: elements between runs."""
    parts = [torch.randn(blocks, elements + gap, device=device).mul_(100).to(src) for _ in range(sources)]
    parts[0][:, :3] = torch.tensor([-0.0, torch.inf, torch.nan], device=device).to(src)[: min(3, elements)]
    for part in parts[1:]:
        part[:, 0] = -0.0  # 0 + -0 would be 0: the first source is not added to 0
    out = torch.full((blocks, elements + gap), 7.0, device=device).to(dst)
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    expected = out.clone()
    expected[:, :elements] = (total if divisor == 1.0 else total / divisor).to(dst)[:, :elements]
    extension().testing.run_sum(
        [(part.data_ptr(), part.stride(0) * part.element_size()) for part in parts],
        str(src).removeprefix("torch."),
        out.data_ptr(),
        out.stride(0) * out.element_size(),
        str(dst).removeprefix("torch."),
        blocks,
        elements,
        divisor,
        _stream(device),
    )
    assert _equal_bits(out, expected), (device, src, dst, sources, blocks, elements, divisor, gap)


def _equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether all values are equal, -0.0 and 0.0 apart. Any NaN equals any other."""
    both_nan = a.isnan() & b.isnan()
    integers = torch.int32 if a.dtype == torch.float32 else torch.int16
    return bool((both_nan | (a.view(integers) == b.view(integers))).all())
