"""Numbers: gathers bitwise against torch.mm per piece, reductions against float64 and NCCL + cuBLAS, run against run.

Fewer pieces bitwise than all means that cuBLAS chose another kernel for a piece.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from tests.gpu import cases
from tests.gpu.cases import AG, BF16, E4M3, F16, F32, Case, Maker
from tests.gpu.lockstep import Lockstep
from ub_overlap.runtime.extension import extension
from ub_overlap.runtime.ops import c10d_fallback
from ub_overlap.runtime.schedule.builders import build_all
from ub_overlap.runtime.schedule.steps import Compute, Key
from ub_overlap.runtime.session import session

RMS_SLACK, MAX_SLACK = 1.02, 1.25
"""How much larger our error may be than NCCL + cuBLAS's on the same data: its root mean square over all elements, and its
maximum, which a single element decides. fp32 sums of fp32 products differ in order alone: there both may win."""
F32_SLACK = 1.5


def world_group() -> str:
    return str(dist.group.WORLD.group_name)  # type: ignore[union-attr]


def ulps(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return the largest distance in units in the last place."""
    if not a.numel():
        return 0
    half, sign = (32768, torch.int16) if a.element_size() == 2 else (2**31, torch.int32)
    x, y = (t.contiguous().view(sign).to(torch.int64) for t in (a, b))
    x, y = (torch.where(t < 0, -half - t, t) for t in (x, y))
    return int((x - y).abs().max())


def pieces(chunks: int, ranks: int, rank: int, m: int) -> list[tuple[int, int]]:
    """Return the rows [first, last) of the gathered matrix per matmul of a gather's schedule, neighbours merged."""
    schedule = build_all(Key(AG, ranks, chunks, contracts=(False,)))[rank]
    found = []
    for step in schedule.steps:
        if isinstance(step, Compute):
            runs: list[tuple[int, int]] = []
            for region in step.reads:
                first, last = (region.shard * m + int(m * end) for end in (region.lo, region.hi))
                if runs and runs[-1][1] == first:
                    runs[-1] = (runs[-1][0], last)
                else:
                    runs.append((first, last))
            found += runs
    return found


def gather(lockstep: Lockstep, group: str, dtype: torch.dtype, transpose_out: bool, chunks: int, m: int, k: int, n: int) -> str:
    """Compare each piece with torch.mm on it, and the whole with one torch.mm."""
    make = Maker(lockstep.device, lockstep.ranks)
    case = make.gather(dtype, 1, m, k, [(False, transpose_out)], False, True, n=n)
    weight = case[1][1][0]
    whole_case: Case = (AG, (*case[1][:2], [False], [False], *case[1][4:]))
    gathered, whole = cases.run_plain(whole_case, world_group())
    strategy = f"pipelined:chunks={chunks}" if chunks else "pipelined"
    kept, product = cases.run_op(case, strategy, group, f"numerics.gather.{dtype}.{transpose_out}.{chunks}.{m}")
    lockstep.sync()
    session.check(group)
    if not torch.equal(kept, gathered):
        raise AssertionError("the gathered matrix differs")
    ours = product.t() if transpose_out else product
    if sorted(pieces(chunks, lockstep.ranks, lockstep.rank, m))[0][0] != 0:
        raise AssertionError("the schedule's pieces do not begin at row 0")
    worst, same, covered = 0, 0, 0
    cuts = [cut for cut in pieces(chunks, lockstep.ranks, lockstep.rank, m) if cut[1] > cut[0]]
    for first, last in cuts:
        piece = torch.mm(gathered[first:last], weight)
        covered += last - first
        distance = 0 if torch.equal(piece, ours[first:last]) else ulps(piece, ours[first:last])
        same += distance == 0
        worst = max(worst, distance)
    if covered != whole.shape[0]:
        raise AssertionError(f"the schedule's pieces cover {covered} of {whole.shape[0]} rows")
    # Two fp32 sums of the same products, each rounded once, differ by one rounding, or two where the sum cancels.
    far = (ours.double() - whole.double()).abs()
    size = whole.double().abs().clamp(min=whole.double().square().mean().sqrt())
    off = (far / size).max().item() / torch.finfo(dtype).eps
    if not off <= (2 if dtype != F32 else max(64, 2 * k**0.5)):
        raise AssertionError(f"{off:.3g} roundings from the whole matmul")
    return f"{same} of {len(cuts)} pieces bitwise, max {worst} ulp; {off:.2f} roundings from the whole"


def scaled_gather(lockstep: Lockstep, group: str, row: bool, fast: bool, chunks: int, m: int, k: int, n: int) -> str:
    """Compare each float8 piece with torch._scaled_mm (CPU: the reference), and the gathered bytes."""
    make = Maker(lockstep.device, lockstep.ranks)
    case = make.scaled_gather(BF16, 1, m, k, row, widths=[n], keep=True, fast=fast)
    _, _, (weight,), (weight_scale,) = case[1][:4]
    strategy = f"pipelined:chunks={chunks}" if chunks else "pipelined"
    whole, whole_scale, _ = cases.run_plain(case, world_group())
    kept, kept_scale, ours = cases.run_op(case, strategy, group, f"numerics.scaled.{row}.{fast}.{chunks}.{m}")
    lockstep.sync()
    session.check(group)
    if cases.differs([kept], [whole]) or (row and not torch.equal(kept_scale, whole_scale)):
        raise AssertionError("the gathered matrix or its scales differ")
    worst, same = 0, 0
    cuts = [cut for cut in pieces(chunks, lockstep.ranks, lockstep.rank, m) if cut[1] > cut[0]]
    for first, last in cuts:
        scale = whole_scale[first:last] if row else case[1][1]
        piece = c10d_fallback.scaled_matmul(whole[first:last], weight, scale, weight_scale, None, BF16, fast)
        distance = ulps(piece, ours[first:last])
        same += distance == 0
        worst = max(worst, distance)
    return f"{same} of {len(cuts)} pieces bitwise, max {worst} ulp"


def wire_bits(lockstep: Lockstep, group: str, dtype: torch.dtype, strategy: str) -> str:
    """Compare a float8 wire bitwise: one rank at a time contributes numbers of many binades."""
    rows, cols = 64, 512
    draw = torch.Generator().manual_seed(5)
    values = torch.randn(lockstep.ranks * rows, cols, generator=draw)
    values *= torch.exp2(
        torch.randint(-60, 60, (lockstep.ranks * rows, 1), generator=draw) + 4 * torch.randn(values.shape, generator=draw)
    )
    values[3], values[5, :128] = 0, values[5, :128].abs()
    exact = values.clamp(-6e4, 6e4).to(dtype)
    mine = exact[lockstep.rank * rows : (lockstep.rank + 1) * rows].float()
    # The reference runs on the CPU, whose divisions are exact.
    segments = mine.unflatten(1, (-1, 128))
    scale = (segments.abs().amax(2, keepdim=True) / 448).clamp(min=torch.finfo(F32).smallest_normal)
    rounded = ((segments * (1 / scale)).to(E4M3).float() * scale).flatten(1)
    eye, right = torch.eye(lockstep.ranks * rows, dtype=dtype, device=lockstep.device), exact.to(lockstep.device)
    for sender in range(lockstep.ranks):
        left = eye if lockstep.rank == sender else torch.zeros_like(eye)
        out, _, _ = torch.ops.ub_overlap.matmul_reduce_scatter(
            [left],
            [right],
            None,
            1,
            False,
            "sum",
            F32,
            False,
            "float8",
            [],
            [],
            strategy,
            group,
            f"numerics.wire.{dtype}.{sender}",
        )
        lockstep.sync()
        session.check(group)
        want = mine if sender == lockstep.rank else rounded
        if wrong := int((out.cpu() != want).sum()):
            raise AssertionError(f"from rank {sender}: {wrong} of {want.numel()} differ")
    return f"{lockstep.ranks} senders, bitwise"


def errors_of(values: list[torch.Tensor], exact: torch.Tensor) -> list[tuple[float, float]]:
    """Return (rms, max) of each value's difference to `exact`, over all ranks."""
    found = []
    for value in values:
        gap = value.double() - exact
        sums = torch.stack([gap.square().sum(), torch.tensor(float(gap.numel()), device=gap.device, dtype=torch.float64)])
        top = gap.abs().max()
        dist.all_reduce(sums)
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        found.append(((sums[0] / sums[1]).sqrt().item(), top.item()))
    return found


def against_plain(lockstep: Lockstep, group: str, case: Case, strategy: str, which: int, site: str) -> str:
    """Check that output `which` has no larger error against float64 than the c10d op, up to a slack."""
    world = world_group()
    exact, plain = cases.run_exact(case, world)[which], cases.run_plain(case, world)[which]

    def call() -> torch.Tensor:
        out = cases.run_op(case, strategy, group, site)[which]
        lockstep.sync()
        session.check(group)
        return out

    ours = lockstep.agree(call)
    (rms, top), (plain_rms, plain_top) = errors_of([ours, plain], exact)
    wide = ours.dtype == F32
    rms_slack, max_slack = (F32_SLACK, 2.0) if wide else (RMS_SLACK, MAX_SLACK)
    note = (
        f"rms {rms / plain_rms if plain_rms else 1:.3f}, max {top / plain_top if plain_top else 1:.3f} of the plain op's error"
    )
    if not (rms <= rms_slack * plain_rms and top <= max_slack * plain_top):
        raise AssertionError(f"{note}; allowed {rms_slack} and {max_slack}")
    return note


def repeats(lockstep: Lockstep, group: str, kind: str, times: int) -> str:
    """Queue the same call many times and compare bits."""
    case, strategy = Maker(lockstep.device, lockstep.ranks).kind(kind, 512)
    runs = [cases.run_op(case, strategy, group, f"numerics.repeat.{kind}") for _ in range(times)]
    lockstep.sync()
    session.check(group)
    bad = [i for i, run in enumerate(runs) if bool(cases.differs(run, runs[0]))]
    if bad:
        raise AssertionError(f"runs {bad[:5]} differ from the first")
    return f"{times} runs, bitwise"


RANKS = int(os.environ.get("WORLD_SIZE", "2"))
full = pytest.mark.full
DTYPES = [BF16, F32, pytest.param(F16, marks=full)]
# Rows of a shard, K and N; "large" is a quarter as large on the CPU.
SHAPES = ["large", pytest.param("odd", marks=full), pytest.param("small", marks=full), pytest.param("llama", marks=full)]
STRATEGIES = ["pipelined", f"pipelined:chunks={2 * RANKS}", "pipelined:stripes=3", "direct"]
SCALINGS = [(False, False), (True, False), (False, True), (True, True)]


def sizes_of(lockstep: Lockstep, shape: str) -> tuple[int, int, int]:
    large = (512, 1024, 512) if lockstep.cuda else (128, 256, 128)
    if shape == "llama" and not lockstep.cuda:
        pytest.skip("too large for the CPU")
    return {"large": large, "odd": (101, 264, 136), "small": (64, 72, 40), "llama": (8192 // lockstep.ranks, 8192, 3584)}[shape]


def square_of(lockstep: Lockstep) -> tuple[int, int]:
    """Width and inner size of the products that are compared with float64."""
    return (2048, 1024) if lockstep.cuda else (512, 256)


@pytest.mark.parametrize(
    ("chunks", "transposed"),
    [
        (0, False),
        (2 * RANKS, False),
        pytest.param(0, True, marks=full),
        pytest.param(2, False, marks=full),
        pytest.param(2 * RANKS + 1, False, marks=full),
    ],
)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather(lockstep: Lockstep, group: str, dtype: torch.dtype, shape: str, chunks: int, transposed: bool) -> None:
    lockstep.note(gather(lockstep, group, dtype, transposed, chunks, *sizes_of(lockstep, shape)))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scatter(lockstep: Lockstep, group: str, dtype: torch.dtype, strategy: str) -> None:
    (size, depth), make = square_of(lockstep), Maker(lockstep.device, lockstep.ranks)
    case = make.scatter(dtype, 1, size // lockstep.ranks, size, depths=[depth])
    lockstep.note(against_plain(lockstep, group, case, strategy, 0, f"numerics.rs.{dtype}.{strategy}"))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_reduce(lockstep: Lockstep, group: str, dtype: torch.dtype, strategy: str) -> None:
    (size, depth), make = square_of(lockstep), Maker(lockstep.device, lockstep.ranks)
    case = make.reduce(dtype, size + 5, size, depth)
    lockstep.note(against_plain(lockstep, group, case, strategy, 0, f"numerics.ar.{dtype}.{strategy}"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scatter_of_two_terms_and_a_bias(lockstep: Lockstep, group: str, dtype: torch.dtype) -> None:
    (size, depth), make = square_of(lockstep), Maker(lockstep.device, lockstep.ranks)
    case = make.scatter(dtype, 1, size // lockstep.ranks, size, depths=[depth, depth // 2], bias=True)
    lockstep.note(against_plain(lockstep, group, case, "pipelined", 0, f"numerics.rs2.{dtype}"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weight_gradient(lockstep: Lockstep, group: str, dtype: torch.dtype) -> None:
    (size, _), make = square_of(lockstep), Maker(lockstep.device, lockstep.ranks)
    case = make.gather(dtype, 1, size // lockstep.ranks, size, [(True, False)], False, False, n=256)
    lockstep.note(against_plain(lockstep, group, case, "pipelined", 1, f"numerics.wg.{dtype}"))


@pytest.mark.parametrize("chunks", [0, 2 * RANKS])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("per_row", "fast"), SCALINGS)
def test_float8_gather(lockstep: Lockstep, group: str, per_row: bool, fast: bool, shape: str, chunks: int) -> None:
    m, k, n = sizes_of(lockstep, shape)
    lockstep.note(scaled_gather(lockstep, group, per_row, fast, chunks, m, -(-k // 16) * 16, -(-n // 16) * 16))


@pytest.mark.parametrize(("per_row", "fast"), SCALINGS)
def test_float8_gather_against_float64(lockstep: Lockstep, group: str, per_row: bool, fast: bool) -> None:
    (size, _), make = square_of(lockstep), Maker(lockstep.device, lockstep.ranks)
    case = make.scaled_gather(BF16, 1, size // lockstep.ranks, size, per_row, widths=[size], fast=fast)
    lockstep.note(against_plain(lockstep, group, case, "pipelined", 2, f"numerics.sag.{per_row}.{fast}"))


@pytest.mark.parametrize(("per_row", "fast"), SCALINGS)
def test_float8_scatter_against_float64(lockstep: Lockstep, group: str, per_row: bool, fast: bool) -> None:
    (size, depth), make = square_of(lockstep), Maker(lockstep.device, lockstep.ranks)
    case = make.scaled_scatter(BF16, 1, size // lockstep.ranks, size, per_row, depths=[depth], fast=fast)
    lockstep.note(against_plain(lockstep, group, case, "pipelined", 0, f"numerics.srs.{per_row}.{fast}"))


@pytest.mark.parametrize(
    ("dtype", "strategy"), [(BF16, "pipelined"), (F32, "pipelined:stripes=2"), (F16, f"pipelined:chunks={2 * RANKS}")], ids=str
)
def test_float8_wire(lockstep: Lockstep, group: str, dtype: torch.dtype, strategy: str) -> None:
    lockstep.note(wire_bits(lockstep, group, dtype, strategy))


@pytest.mark.parametrize(
    "kind", ["AG", "AG2", "RS", "RS1", "RS striped", "AR", "SAG", "SAG2", "SRS", "SRS wire", "bulk", "bulk RS"]
)
def test_equal_bits_in_every_run(lockstep: Lockstep, group: str, kind: str) -> None:
    lockstep.note(repeats(lockstep, group, kind, 20))


@pytest.mark.parametrize("addend", [False, True], ids=["", "addend"])
def test_a_direct_product_is_one_launch(lockstep: Lockstep, group: str, addend: bool) -> None:
    """cuBLASLt takes the addresses of all shards at once, from version 13.1 on. The addend is a matrix."""
    if not lockstep.cuda:
        pytest.skip("the CPU has no cuBLASLt")
    make, size = Maker(lockstep.device, lockstep.ranks), 1024
    op, arguments = make.scatter(BF16, 1, size // lockstep.ranks, size, depths=[size])
    if addend:
        arguments = (*arguments[:2], make.randn(size, size, dtype=BF16), *arguments[3:])
    lockstep.note(against_plain(lockstep, group, (op, arguments), "direct", 0, f"numerics.direct.{addend}"))
    texts = [text for _, text, *_ in extension().matmul_problems()]
    if extension().blas_version() >= 130100:
        assert any(f"batch of {lockstep.ranks} by address" in text for text in texts), texts
