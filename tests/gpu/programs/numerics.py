"""Numbers: gathers bitwise against torch.mm on each piece, reductions against float64 beside NCCL + cuBLAS, run against run.

    torchrun --nproc-per-node 4 tests/gpu/programs/numerics.py [--quick] [--only TEXT] [--device cpu]

A row "close" is right, but not bit for bit what torch.mm gives for the same piece: another kernel was chosen.
"""

# ruff: noqa: E402   the path comes first

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[3])

from tests.gpu.frame import Frame, Result  # isort: skip

import torch
import torch.distributed as dist

from tests.gpu import cases
from tests.gpu.cases import AG, BF16, E4M3, F16, F32, Case, Maker
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
    """The largest distance in representable numbers."""
    if not a.numel():
        return 0
    half, sign = (32768, torch.int16) if a.element_size() == 2 else (2**31, torch.int32)
    x, y = (t.contiguous().view(sign).to(torch.int64) for t in (a, b))
    x, y = (torch.where(t < 0, -half - t, t) for t in (x, y))
    return int((x - y).abs().max())


def pieces(chunks: int, ranks: int, rank: int, m: int) -> list[tuple[int, int]]:
    """Rows [first, last) of the gathered matrix that one matmul of a gather's schedule takes, with its neighbours merged."""
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


def gather(frame: Frame, group: str, dtype: torch.dtype, mode: int, chunks: int, m: int, k: int, n: int) -> Result:
    """Mode 0 or 1: each piece against torch.mm on it; the whole against one torch.mm."""
    make = Maker(frame.device, frame.ranks)
    case = make.gather(dtype, 1, m, k, [mode], False, True, n=n)
    weight = case[1][1][0]
    whole_case: Case = (AG, (*case[1][:2], [0], *case[1][3:]))
    gathered, whole = cases.run_plain(whole_case, world_group())
    strategy = f"pipelined:chunks={chunks}" if chunks else "pipelined"
    kept, product = cases.run_op(case, strategy, group, f"numerics.gather.{dtype}.{mode}.{chunks}.{m}")
    frame.sync()
    session.check(group)
    if not torch.equal(kept, gathered):
        raise AssertionError("the gathered matrix differs")
    ours = product.t() if mode == 1 else product
    if sorted(pieces(chunks, frame.ranks, frame.rank, m))[0][0] != 0:
        raise AssertionError("the schedule's pieces do not begin at row 0")
    worst, same, covered = 0, 0, 0
    cuts = [cut for cut in pieces(chunks, frame.ranks, frame.rank, m) if cut[1] > cut[0]]
    for first, last in cuts:
        piece = torch.mm(gathered[first:last], weight)
        covered += last - first
        distance = 0 if torch.equal(piece, ours[first:last]) else ulps(piece, ours[first:last])
        same += distance == 0
        worst = max(worst, distance)
    if covered != whole.shape[0]:
        raise AssertionError(f"the schedule's pieces cover {covered} of {whole.shape[0]} rows")
    # Two sums of the same products in fp32, each rounded once: a rounding apart, or two where the sum cancels.
    far = (ours.double() - whole.double()).abs()
    size = whole.double().abs().clamp(min=whole.double().square().mean().sqrt())
    off = (far / size).max().item() / torch.finfo(dtype).eps
    if not off <= (2 if dtype != F32 else max(64, 2 * k**0.5)):
        raise AssertionError(f"{off:.3g} roundings from the whole matmul")
    note = f"{same} of {len(cuts)} pieces bitwise, max {worst} ulp; {off:.2f} roundings from the whole"
    return Result("ok" if same == len(cuts) else "close", note)


def scaled_gather(frame: Frame, group: str, row: bool, fast: bool, chunks: int, m: int, k: int, n: int) -> Result:
    """float8: each piece against torch._scaled_mm on it (on the CPU: the reference), and the gathered bytes."""
    make = Maker(frame.device, frame.ranks)
    case = make.scaled_gather(BF16, 1, m, k, row, widths=[n], keep=True, fast=fast)
    _, _, (weight,), (weight_scale,) = case[1][:4]
    strategy = f"pipelined:chunks={chunks}" if chunks else "pipelined"
    whole, whole_scale, _ = cases.run_plain(case, world_group())
    kept, kept_scale, ours = cases.run_op(case, strategy, group, f"numerics.scaled.{row}.{fast}.{chunks}.{m}")
    frame.sync()
    session.check(group)
    if cases.differs([kept], [whole]) or (row and not torch.equal(kept_scale, whole_scale)):
        raise AssertionError("the gathered matrix or its scales differ")
    worst, same = 0, 0
    cuts = [cut for cut in pieces(chunks, frame.ranks, frame.rank, m) if cut[1] > cut[0]]
    for first, last in cuts:
        scale = whole_scale[first:last] if row else case[1][1]
        piece = c10d_fallback.scaled_product(whole[first:last], weight, scale, weight_scale, None, BF16, fast)
        distance = ulps(piece, ours[first:last])
        same += distance == 0
        worst = max(worst, distance)
    return Result("ok" if same == len(cuts) else "close", f"{same} of {len(cuts)} pieces bitwise, max {worst} ulp")


def wire_bits(frame: Frame, group: str, dtype: torch.dtype, strategy: str) -> str:
    """A float8 wire, bit for bit: each rank in turn contributes numbers of many binades, the others nothing."""
    rows, cols = 64, 512
    draw = torch.Generator().manual_seed(5)
    values = torch.randn(frame.ranks * rows, cols, generator=draw)
    values *= torch.exp2(
        torch.randint(-60, 60, (frame.ranks * rows, 1), generator=draw) + 4 * torch.randn(values.shape, generator=draw)
    )
    values[3], values[5, :128] = 0, values[5, :128].abs()
    exact = values.clamp(-6e4, 6e4).to(dtype)
    mine = exact[frame.rank * rows : (frame.rank + 1) * rows].float()
    # The model, on the CPU, whose divisions are divisions.
    segments = mine.unflatten(1, (-1, 128))
    scale = (segments.abs().amax(2, keepdim=True) / 448).clamp(min=torch.finfo(F32).smallest_normal)
    rounded = ((segments * (1 / scale)).to(E4M3).float() * scale).flatten(1)
    eye, right = torch.eye(frame.ranks * rows, dtype=dtype, device=frame.device), exact.to(frame.device)
    for sender in range(frame.ranks):
        left = eye if frame.rank == sender else torch.zeros_like(eye)
        out, _ = torch.ops.ub_overlap.matmul_reduce_scatter(
            [left],
            [right],
            None,
            1,
            False,
            "sum",
            F32,
            False,
            strategy,
            group,
            f"numerics.wire.{dtype}.{sender}",
            wire="float8",
        )
        frame.sync()
        session.check(group)
        want = mine if sender == frame.rank else rounded
        if wrong := int((out.cpu() != want).sum()):
            raise AssertionError(f"from rank {sender}: {wrong} of {want.numel()} differ")
    return f"{frame.ranks} senders, bitwise"


def errors_of(values: list[torch.Tensor], exact: torch.Tensor) -> list[tuple[float, float]]:
    """(rms, max) of each value's difference to `exact`, over all ranks."""
    found = []
    for value in values:
        gap = value.double() - exact
        sums = torch.stack([gap.square().sum(), torch.tensor(float(gap.numel()), device=gap.device, dtype=torch.float64)])
        top = gap.abs().max()
        dist.all_reduce(sums)
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        found.append(((sums[0] / sums[1]).sqrt().item(), top.item()))
    return found


def against_plain(frame: Frame, group: str, case: Case, strategy: str, which: int, site: str) -> str:
    """Output `which` of a case: its error against float64 is no larger than the plain op's, up to the stated slack."""
    world = world_group()
    exact, plain = cases.run_exact(case, world)[which], cases.run_plain(case, world)[which]

    def call() -> torch.Tensor:
        out = cases.run_op(case, strategy, group, site)[which]
        frame.sync()
        session.check(group)
        return out

    ours = frame.together(call)
    (rms, top), (plain_rms, plain_top) = errors_of([ours, plain], exact)
    wide = ours.dtype == F32
    rms_slack, max_slack = (F32_SLACK, 2.0) if wide else (RMS_SLACK, MAX_SLACK)
    note = (
        f"rms {rms / plain_rms if plain_rms else 1:.3f}, max {top / plain_top if plain_top else 1:.3f} of the plain op's error"
    )
    if not (rms <= rms_slack * plain_rms and top <= max_slack * plain_top):
        raise AssertionError(f"{note}; allowed {rms_slack} and {max_slack}")
    return note


def repeats(frame: Frame, group: str, kind: str, times: int) -> str:
    """The same call so many times, queued at once: the same bits."""
    case, strategy = Maker(frame.device, frame.ranks).kind(kind, 512)
    runs = [cases.run_op(case, strategy, group, f"numerics.repeat.{kind}") for _ in range(times)]
    frame.sync()
    session.check(group)
    bad = [i for i, run in enumerate(runs) if bool(cases.differs(run, runs[0]))]
    if bad:
        raise AssertionError(f"runs {bad[:5]} differ from the first")
    return f"{times} runs, bitwise"


def main() -> int:
    with Frame("numerics") as frame:
        quick, world, make = frame.options.quick, frame.ranks, Maker(frame.device, frame.ranks)
        big = 1 if not frame.cuda else 4  # the CPU is here to try the program, not to multiply
        shapes = [(512 * big // 4, 1024 * big // 4, 512 * big // 4)] + ([] if quick else [(101, 264, 136), (64, 72, 40)])
        if frame.cuda and not quick:
            shapes.append((8192 // world, 8192, 3584))
        for dtype in (BF16, F32) if quick else (BF16, F16, F32):
            for m, k, n in shapes:
                for chunks in (0, 2 * world) if quick else (0, 2, 2 * world, 2 * world + 1):
                    for mode in (0,) if quick or chunks else (0, 1):
                        name = f"gather {str(dtype)[6:]} [{m * world}, {k}] @ [{k}, {n}] mode {mode} chunks {chunks or 'R'}"
                        frame.row(
                            name,
                            lambda g, a=(dtype, mode, chunks, m, k, n): gather(frame, g, *a),  # type: ignore[arg-type]
                        )
        size, depth = 512 * big, 256 * big
        for dtype in (BF16, F32) if quick else (BF16, F16, F32):
            label = str(dtype)[6:]
            for strategy in ("pipelined", f"pipelined:chunks={2 * world}", "pipelined:stripes=3"):
                frame.row(
                    f"scatter {label} {strategy}",
                    lambda g, d=dtype, s=strategy: against_plain(
                        frame, g, make.scatter(d, 1, size // world, size, depths=[depth]), s, 0, f"numerics.rs.{d}.{s}"
                    ),
                )
                frame.row(
                    f"all_reduce {label} {strategy}",
                    lambda g, d=dtype, s=strategy: against_plain(
                        frame, g, make.reduce(d, size + 5, size, depth), s, 0, f"numerics.ar.{d}.{s}"
                    ),
                )
            frame.row(
                f"scatter {label} two terms, bias",
                lambda g, d=dtype: against_plain(
                    frame,
                    g,
                    make.scatter(d, 1, size // world, size, depths=[depth, depth // 2], bias=True),
                    "pipelined",
                    0,
                    f"numerics.rs2.{d}",
                ),
            )
            frame.row(
                f"weight gradient {label}",
                lambda g, d=dtype: against_plain(
                    frame,
                    g,
                    make.gather(d, 1, size // world, size, [2], False, False, n=256),
                    "pipelined",
                    1,
                    f"numerics.wg.{d}",
                ),
            )
        for row, fast in ((False, False), (True, False), (False, True), (True, True)):
            label = f"{'row' if row else 'tensor'} scales{', fast sums' if fast else ''}"
            for m, k, n in shapes if not quick else shapes[:1]:
                wide, deep = -(-n // 16) * 16, -(-k // 16) * 16
                for chunks in (0, 2 * world):
                    frame.row(
                        f"float8 gather {label} [{m * world}, {deep}] @ [{deep}, {wide}] chunks {chunks or 'R'}",
                        lambda g, a=(row, fast, chunks, m, deep, wide): scaled_gather(frame, g, *a),  # type: ignore[arg-type]
                    )
            frame.row(
                f"float8 gather {label} against float64",
                lambda g, r=row, f=fast: against_plain(
                    frame, g, make.scaled_gather(BF16, 1, size // world, size, r, widths=[size], fast=f), "pipelined", 2,
                    f"numerics.sag.{r}.{f}",
                ),
            )  # fmt: skip
            frame.row(
                f"float8 scatter {label} against float64",
                lambda g, r=row, f=fast: against_plain(
                    frame, g, make.scaled_scatter(BF16, 1, size // world, size, r, depths=[depth], fast=f), "pipelined", 0,
                    f"numerics.srs.{r}.{f}",
                ),
            )  # fmt: skip
        for dtype, strategy in ((BF16, "pipelined"), (F32, "pipelined:stripes=2"), (F16, f"pipelined:chunks={2 * world}")):
            frame.row(f"float8 wire {str(dtype)[6:]} {strategy}", lambda g, d=dtype, s=strategy: wire_bits(frame, g, d, s))
        for kind in ("AG", "AG2", "RS", "RS1", "RS striped", "AR", "SAG", "SAG2", "SRS", "SRS wire", "bulk", "bulk RS"):
            frame.row(f"repeats {kind}", lambda g, k=kind: repeats(frame, g, k, 20))
    return frame.code


if __name__ == "__main__":
    sys.exit(main())
