"""Write out of bounds in a kernel named like ours: memcheck must report it. Exit code 3: this torch compiles no kernels."""

from __future__ import annotations

import sys

import torch

SOURCE = 'extern "C" __global__ void ub_overlap_control(float* x) { x[1 << 20] = 1.0f; }'


def main() -> int:
    build = getattr(torch.cuda, "_compile_kernel", None)
    if build is None:
        return 3
    kernel = build(SOURCE, "ub_overlap_control")
    kernel((1, 1, 1), (1, 1, 1), (torch.empty(16, device="cuda"),))
    torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
