"""Time cuBLASLt's float8 matmuls with scales of blocks (1 x 128, 128 x 128) against other scales. One Hopper GPU.

    python -m benchmarks.gated_matmul.block_float8 [--rows 8192] [--json OUT]

All are torch's scaled matmuls of e4m3 operands with bf16 results, in CUDA graphs whose replays alternate. Errors: relative, to
the fp32 matmul of the dequantized operands. What cuBLASLt refuses is asked of its heuristic, by block_float8.cu.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
from collections.abc import Callable, Iterator
from math import exp, log
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from .__main__ import facts, rounded
from .clock import interleaved
from .shapes import Shape, shapes

LARGEST = 448.0
TYPES = ("e4m3", "e5m2", "bf16", "fp16", "fp32")
MODES = ("tensor", "row", "1x128", "128x128")


class Quantized:
    """e4m3 values [rows, k] with scales of one kind."""

    def __init__(self, x: Tensor, mode: str) -> None:
        rows, k = x.shape
        high, wide = {"tensor": (rows, k), "row": (1, k), "1x128": (1, 128), "128x128": (128, 128)}[mode]
        blocks = x.float().view(rows // high, high, k // wide, wide)
        scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / LARGEST
        self.mode = mode
        self.values = (blocks / scale).to(torch.float8_e4m3fn).view(rows, k)
        self.exact = (self.values.float().view(blocks.shape) * scale).view(rows, k)
        self.scale = scale.view(rows // high, k // wide)

    def stored(self) -> Tensor:
        """Return scales of blocks in the layout of cuBLASLt: the blocks of a row are padded to a multiple of four."""
        if self.mode == "1x128":
            return self.scale.t().contiguous().t()
        rows, count = self.scale.shape
        padded = torch.zeros(rows, -(-count // 4) * 4, device=self.scale.device)
        padded[:, :count] = self.scale
        return padded.t()


RECIPES = {"1x128": ScalingType.BlockWise1x128, "128x128": ScalingType.BlockWise128x128}
VARIANTS = {
    "tensor fast": ("tensor", "tensor", True),
    "tensor": ("tensor", "tensor", False),
    "row fast": ("row", "row", True),
    "row": ("row", "row", False),
    "1x128 by 128x128": ("1x128", "128x128", False),
    "1x128 by 1x128": ("1x128", "1x128", False),
    "128x128 by 1x128": ("128x128", "1x128", False),
}
"""Scales of the left and the right operand, whether sums may stay in the tensor cores' own precision."""


def call(a: Quantized, b: Quantized, fast: bool) -> Callable[[], Tensor]:
    kind = torch.bfloat16
    if a.mode in RECIPES:
        scales = a.stored(), RECIPES[a.mode], b.stored(), RECIPES[b.mode]
        return lambda: scaled_mm(a.values, b.values.t(), *scales, output_dtype=kind)
    left, right = a.scale, b.scale.t()
    return lambda: torch._scaled_mm(a.values, b.values.t(), left, right, out_dtype=kind, use_fast_accum=fast)


def old_way(a: Quantized, b: Quantized) -> Tensor:
    """torch._scaled_mm, which takes scales of 128 x 128 blocks without padding."""
    left, right = (x.stored() if x.mode == "1x128" else x.scale.contiguous() for x in (a, b))
    return torch._scaled_mm(a.values, b.values.t(), left, right.t(), out_dtype=torch.bfloat16)


def measure(shape: Shape, rounds: int) -> dict[str, Any]:
    """Return microseconds and errors by variant."""
    made = torch.Generator("cuda").manual_seed(1)
    x, w = (torch.randn(size, shape.k, generator=made, device="cuda").bfloat16() for size in (shape.m, shape.n))
    row: dict[str, Any] = {"shape": vars(shape), "error": {}, "old_way_error": {}, "refused": {}}
    bodies: dict[str, Callable[[], object]] = {"bf16": lambda: torch.mm(x, w.t())}
    for name, (left, right, fast) in VARIANTS.items():
        a, b = Quantized(x, left), Quantized(w, right)
        expected = a.exact @ b.exact.t()
        body = call(a, b, fast)
        try:
            row["error"][name] = _error(body(), expected)
            bodies[name] = body
        except (RuntimeError, ValueError) as error:
            row["refused"][name] = str(error).split("\n")[0][:300]
        if left in RECIPES:
            try:
                row["old_way_error"][name] = _error(old_way(a, b), expected)
            except (RuntimeError, ValueError) as error:
                row["old_way_error"][name] = str(error).split("\n")[0][:300]
        del a.exact, b.exact, expected
    times = interleaved(bodies, rounds, 4)
    row["us"] = {name: us for name, (us, _) in times.items()}
    row["spread_us"] = {name: spread for name, (_, spread) in times.items()}
    return row


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


class Query(ctypes.Structure):
    """A question to cuBLASLt, as in block_float8.cu."""

    _names = ("a_type", "b_type", "out_type", "a_mode", "b_mode", "a_columns", "b_columns", "fast", "bias")
    _fields_ = [(name, ctypes.c_int32) for name in _names]
    _fields_ += [(name, ctypes.c_int64) for name in ("m", "n", "k")] + [("scales", ctypes.c_void_p)]


def questions() -> Iterator[dict[str, Any]]:
    """Yield what is asked: one property at a time, from a usual matmul."""
    usual = dict(a_type="e4m3", b_type="e4m3", out_type="bf16", a_mode="1x128", b_mode="128x128", a_columns=0, b_columns=0)
    usual |= dict(fast=0, bias=0, m=4096, n=4096, k=4096)
    yield usual
    for a_mode in MODES:
        for b_mode in MODES:
            yield usual | {"a_mode": a_mode, "b_mode": b_mode}
    pairs = (("1x128", "128x128"), ("128x128", "1x128"), ("1x128", "1x128"))
    for a_mode, b_mode in pairs:
        base = usual | {"a_mode": a_mode, "b_mode": b_mode}
        for change in (
            *({"a_columns": x, "b_columns": y} for x, y in ((0, 1), (1, 0), (1, 1))),
            *({"out_type": kind} for kind in ("fp16", "fp32", "e4m3")),
            *({"a_type": x, "b_type": y} for x, y in (("e5m2", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e5m2"))),
            {"fast": 1},
            {"bias": 1},
            *({"m": m} for m in (1, 8, 16, 100, 127, 4100)),
            *({"n": n} for n in (64, 4104, 4112, 4160)),
            *({"k": k} for k in (64, 128, 192, 4112, 4160, 4224)),
        ):
            yield base | change


def refusals(folder: Path) -> list[dict[str, Any]]:
    """Return the answers of cuBLASLt: the number of its algorithms, or the negative status."""
    folder.mkdir(parents=True, exist_ok=True)
    source, target = Path(__file__).with_suffix(".cu"), folder / "libblock_float8.so"
    subprocess.run(["nvcc", "-shared", "-Xcompiler", "-fPIC", str(source), "-o", str(target), "-lcublasLt"], check=True)
    ask = ctypes.CDLL(str(target)).algorithms
    scales = torch.ones(4 << 20, device="cuda")
    answers = []
    for question in questions():
        values = dict(question)
        for key in ("a_type", "b_type", "out_type"):
            values[key] = TYPES.index(values[key])
        for key in ("a_mode", "b_mode"):
            values[key] = MODES.index(values[key])
        answers.append(question | {"algorithms": ask(ctypes.byref(Query(**values, scales=scales.data_ptr())))})
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="8192")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--build", type=Path, default=Path("build/gated_matmul"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    document: dict[str, Any] = facts() | {"benchmark": "block_float8"}
    document["command"] = document["command"].replace("gated_matmul", "gated_matmul.block_float8", 1)
    document["rows"] = []
    for shape in shapes(["8b", "70b"], [4, 8], [int(size) for size in args.rows.split(",")]):
        document["rows"].append(rounded(measure(shape, args.rounds)))
    names = ["bf16", *VARIANTS]
    print(f"{'TFLOP/s':32}" + "".join(f"{name:>18}" for name in names))
    for row in document["rows"]:
        flop = 2e-6 * row["shape"]["m"] * row["shape"]["n"] * row["shape"]["k"]
        cells = "".join(f"{flop / row['us'][name]:18.0f}" if name in row["us"] else f"{'-':>18}" for name in names)
        print(f"{Shape(**row['shape']).name:32}{cells}")
    for name in VARIANTS:
        ratios = [row["us"]["tensor fast"] / row["us"][name] for row in document["rows"] if name in row["us"]]
        errors = [row["error"][name] for row in document["rows"] if name in row["error"]]
        if ratios:
            mean = exp(sum(map(log, ratios)) / len(ratios))
            print(f"{name}: {mean:.3f} of the speed of tensor fast, largest error {max(errors):.2e}")
    for row in document["rows"]:
        print(Shape(**row["shape"]).name, "refused:", row["refused"], "old way:", row["old_way_error"])
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    document["answers"] = refusals(args.build)
    for answer in document["answers"]:
        print(" ".join(f"{key}={value}" for key, value in answer.items()))
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
