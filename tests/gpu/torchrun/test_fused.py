"""Fused collectives: results against float64 over sizes, norms and strategies; graphs with grids of different sizes, replayed
thousands of times under random delays; failures."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.compiler import fused_forms, rank_fused
from tests.gpu import captures as inductor_graphs
from tests.gpu import cases
from tests.gpu.cases import BF16, E4M3, E5M2, F16, F32, Case, Maker, Truth
from tests.gpu.lockstep import STEP_TIMEOUT_S, Lockstep
from ub_overlap.runtime import errors, ops, stats
from ub_overlap.runtime.session import session


@dataclass(frozen=True)
class Shape:
    """A fused collective of `rows` rows of a rank's result (all_gather: of its shard)."""

    rows: int
    cols: int
    dtype: torch.dtype = BF16
    norm: str = "rms"
    collective: str = "all_reduce"
    residual: bool = True
    weight: bool = True
    by: str = "sum"
    round_before_weight: bool = False
    scale: torch.dtype | None = None
    by_row: bool = False
    round_sum: bool = True
    divides: bool = False
    offset: float = 0.0
    linear_bias: bool = False
    branch: str = "none"
    factor: float = 1.0
    addend: bool = False

    def make(self, maker: Maker) -> Case:
        return maker.fused(
            self.dtype, self.rows, self.cols, self.collective, self.norm, self.by, self.residual, self.weight,
            self.round_before_weight, self.scale, self.by_row, self.round_sum, self.divides, self.offset,
            self.linear_bias, self.branch, self.factor, self.addend,
        )  # fmt: skip

    def __str__(self) -> str:
        parts = [self.collective, self.norm, f"{self.rows}x{self.cols}", str(self.dtype).removeprefix("torch."), self.by]
        return " ".join(
            [
                *parts,
                *(["fp8"] if self.scale else []),
                *(["rounded"] if self.round_before_weight else []),
                *(["by row"] if self.by_row else []),
                *(["wide sum"] if not self.round_sum else []),
                *(["weight offset"] if self.offset else []),
                *(["linear bias"] if self.linear_bias else []),
                *([f"branch {self.branch}"] if self.branch != "none" else []),
                *([f"factor {self.factor}"] if self.factor != 1 else []),
                *(["addend"] if self.addend else []),
            ]
        )


def plain_sum(rows: int, cols: int, dtype: torch.dtype = BF16, **more: Any) -> Shape:
    return Shape(rows, cols, dtype, norm="none", residual=False, **more)


SHAPES = [
    *(Shape(rows, cols) for cols in (2048, 4096, 8192) for rows in (1, 2, 3, 16, 64, 65, 200, 512)),
    *(Shape(rows, 8192, norm="layer") for rows in (1, 7, 100)),
    *(Shape(rows, 4096, dtype) for dtype in (F16, F32) for rows in (1, 33, 130)),
    *(Shape(rows, cols, dtype) for cols, dtype in ((16384, BF16), (8192, F32), (32768, BF16)) for rows in (1, 70)),
    *(Shape(rows, cols) for rows in (1, 5) for cols in (8, 40, 264, 520)),
    *(Shape(5, 4096, residual=residual, weight=weight) for residual in (False, True) for weight in (False, True)),
    *(Shape(9, 4096, scale=scale) for scale in (E4M3, E5M2)),
    Shape(9, 512, F32, scale=E4M3),
    *(Shape(rows, cols, scale=E4M3, by_row=True, divides=rows == 3) for cols in (40, 4096, 8192) for rows in (1, 3, 70)),
    *(Shape(rows, 8192, norm="layer", scale=E5M2, by_row=True, round_sum=False) for rows in (1, 100)),
    *(Shape(rows, cols, round_sum=False, round_before_weight=True) for cols in (40, 8192) for rows in (1, 70)),
    Shape(9, 512, F32, scale=E4M3, by_row=True),
    Shape(9, 4096, round_before_weight=True),
    *(Shape(rows, 4096, dtype, offset=1.0) for dtype in (BF16, F32) for rows in (1, 70)),
    *(Shape(rows, 8192, norm="layer", offset=1.0, scale=E4M3, by_row=rows > 1) for rows in (1, 70)),
    *(Shape(rows, cols, dtype, branch="rms") for cols, dtype in ((40, BF16), (4096, BF16), (8192, F32)) for rows in (1, 70)),
    *(Shape(rows, 8192, norm="layer", branch="layer", factor=0.22, linear_bias=True, addend=True) for rows in (1, 9, 100)),
    *(Shape(rows, cols, addend=True, round_sum=False) for cols in (4096, 32768) for rows in (1, 70)),
    *(Shape(rows, 4096, norm="none", branch="rms", offset=1.0) for rows in (1, 33)),
    *(Shape(rows, 4096, F16, linear_bias=True, factor=0.22, round_sum=False) for rows in (1, 33)),
    *(Shape(rows, 8192, branch="rms", scale=E4M3, by_row=True, weight=rows == 1) for rows in (1, 70)),
    *(Shape(rows, 32768, branch="layer", linear_bias=True, round_before_weight=True) for rows in (1, 70)),
    Shape(65, 4096, collective="reduce_scatter", branch="rms", linear_bias=True),
    Shape(9, 4096, by="avg"),
    *(plain_sum(1, n) for n in (8, 520, 2048, 8192, 131072, 524288, 1048576, 8388608 + 8)),
    *(plain_sum(3, 1000, dtype) for dtype in (F16, F32)),
    *(Shape(rows, 4096, collective="reduce_scatter") for rows in (1, 2, 65)),
    plain_sum(3, 24, collective="reduce_scatter"),
    *(plain_sum(rows, cols, collective="all_gather") for rows in (1, 66) for cols in (8, 4096)),
]
SMALL = [shape for shape in SHAPES if shape.rows * shape.cols <= 1 << 16]


def strategies(shape: Shape) -> tuple[str, ...]:
    return ("one_shot", "two_shot") if shape.collective == "all_reduce" else ("one_shot",)


@pytest.mark.deadline(150)
def test_results(lockstep: Lockstep, group: str) -> None:
    """Every shape equals float64 as well as the c10d op does; both strategies have the same bits, three times in a row."""
    maker, worst = Maker(lockstep.device, lockstep.ranks), (0.0, 0.0)
    for shape in SMALL if lockstep.quick or not lockstep.cuda else SHAPES:
        case = shape.make(maker)
        truth = Truth.of(case, group)

        def check(case: Case = case, shape: Shape = shape, truth: Truth = truth) -> tuple[float, float]:
            outs = [cases.run_op(case, s, group, f"fused.{s}") for s in strategies(shape) for _ in range(3)]
            lockstep.sync()
            session.check(group)
            assert not any(bool(cases.differs(out, outs[0])) for out in outs), f"{shape}: results differ between calls"
            return truth.check(outs[0], str(shape))

        worst = max(worst, lockstep.agree(check))
    lockstep.note(f"largest error {worst[0]:.2g}, of the c10d op {worst[1]:.2g}")


LOOP = [
    (Shape(1, 8192), "one_shot"),
    (Shape(64, 4096), "two_shot"),
    (plain_sum(1, 520), "one_shot"),
    (Shape(130, 1024, norm="layer"), "one_shot"),
    (plain_sum(4, 4096, collective="all_gather"), "one_shot"),
    (Shape(3, 4096, collective="reduce_scatter"), "one_shot"),
    (Shape(200, 2048), "two_shot"),
    (Shape(3, 8192, norm="layer"), "two_shot"),
    (Shape(2, 8192, norm="layer", scale=E4M3, by_row=True, round_sum=False), "one_shot"),
    (Shape(1, 8192, branch="rms", linear_bias=True, factor=0.22), "one_shot"),
]
"""Grids of 1 to 64 blocks, so that blocks differ in the calls that they have seen."""
VERSIONS = 4


class Loop:
    """Calls on static inputs, with expected results for each version of the inputs."""

    def __init__(self, lockstep: Lockstep, group: str) -> None:
        maker = Maker(lockstep.device, lockstep.ranks)
        self.group, self.lockstep = group, lockstep
        self.versions = [[shape.make(maker) for shape, _ in LOOP] for _ in range(VERSIONS)]
        self.static = [shape.make(maker) for shape, _ in LOOP]
        self.expected = []
        for version in range(VERSIONS):
            self.load(version)
            truths = [Truth.of(case, group) for case in self.static]
            self.expected.append([[t.clone() for t in outs] for outs in self.call()])
            lockstep.sync()
            for truth, outs, (shape, _) in zip(truths, self.expected[-1], LOOP, strict=True):
                truth.check(outs, str(shape))

    def load(self, version: int) -> None:
        for static, case in zip(self.static, self.versions[version], strict=True):
            for to, source in zip(static[1], case[1], strict=True):
                if isinstance(to, torch.Tensor):
                    to.copy_(source)

    def spoil(self) -> None:
        for case in self.static:
            case[1][0].fill_(float("nan"))

    def call(self) -> list[list[torch.Tensor]]:
        return [
            cases.run_op(case, strategy, self.group, f"loop.{i}")
            for i, (case, (_, strategy)) in enumerate(zip(self.static, LOOP, strict=True))
        ]

    def differs(self, outs: list[list[torch.Tensor]], version: int) -> torch.Tensor:
        verdicts = [cases.differs(out, expected) for out, expected in zip(outs, self.expected[version], strict=True)]
        return torch.stack(verdicts).any()


@pytest.mark.deadline(200)
def test_replays(lockstep: Lockstep, group: str) -> None:
    """10,000 replays and eager calls on two streams, under random delays of each rank, are bitwise right."""
    loop, mine, order = Loop(lockstep, group), lockstep.own_random(5), lockstep.shared_random(5)
    lockstep.barrier()
    replay = None
    if lockstep.cuda:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            captured = loop.call()
        lockstep.sync()
        lockstep.barrier()
        replay = graph.replay
    thorough = lockstep.cuda and not lockstep.quick and not lockstep.shares_gpu  # ranks that share a GPU take turns on it
    turns = 10_000 if thorough else 1_000 if lockstep.cuda else 30
    side = torch.cuda.Stream() if lockstep.cuda else None
    wrong = torch.zeros((), dtype=torch.int64, device=lockstep.device)
    begun = time.monotonic()
    for turn in range(turns):
        version = order.randrange(VERSIONS)
        loop.load(version)
        if mine.random() < 0.02:
            lockstep.sleep_on_device(mine.random() * 0.001)
        if replay is not None and turn % 10:
            replay()
            outs = captured
        elif side is not None and turn % 20:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                outs = loop.call()
            torch.cuda.current_stream().wait_stream(side)
        else:
            outs = loop.call()
        wrong += loop.differs(outs, version)
        loop.spoil()
        if turn % 500 == 499:
            lockstep.sync()
            session.check(group)
    lockstep.sync()
    session.check(group)
    assert not int(wrong), f"{int(wrong)} of {turns} turns are wrong"
    lockstep.note(f"{turns} turns of {len(LOOP)} calls, bitwise, {1e6 * (time.monotonic() - begun) / turns:.0f} us a turn")
    if replay is not None:
        del captured, graph


FAILING = [
    ("one_shot", Shape(3, 8192, norm="layer")),
    ("one_shot", Shape(2, 8192, norm="layer", scale=E4M3, by_row=True)),
    ("one_shot", Shape(2, 8192, norm="layer", branch="layer", scale=E4M3, by_row=True)),
    ("two_shot", Shape(70, 1024)),
    ("one_shot", Shape(70, 1024)),
    ("one_shot", Shape(200, 2048)),
]
"""Calls whose rows are dealt out to clusters of blocks, of two to five reductions, and three whose blocks have rows: two-shot,
of packets with two rows a block where there are two ranks, and of regions without a cluster."""


def fails_within(lockstep: Lockstep, group: str, expected: type[Exception], call: Any) -> None:
    """Check that `call` fails with `expected` within twice the deadline, and that its outputs are NaN on CUDA."""
    begun, outs = time.monotonic(), list[torch.Tensor]()

    def run() -> None:
        outs.extend(call())
        lockstep.sync()
        session.check(group)

    with pytest.raises(expected, match="1"):
        run()
    assert time.monotonic() - begun < 2 * STEP_TIMEOUT_S
    lockstep.sync()
    if lockstep.cuda:
        assert all(bool(out.float().isnan().all()) for out in outs), "the outputs are not NaN"


@pytest.mark.deadline(120)
@pytest.mark.parametrize(("strategy", "shape"), FAILING)
def test_another_site(lockstep: Lockstep, own_group: str, strategy: str, shape: Shape) -> None:
    """Rank 1 is at another site."""
    case = shape.make(Maker(lockstep.device, lockstep.ranks))
    cases.run_op(case, strategy, own_group, "fused.first")
    lockstep.sync()
    site = f"fused.site{min(lockstep.rank, 1)}"
    fails_within(lockstep, own_group, errors.SiteMismatchError, lambda: cases.run_op(case, strategy, own_group, site))


@pytest.mark.deadline(120)
@pytest.mark.parametrize(("strategy", "shape"), FAILING)
def test_a_skipped_call(lockstep: Lockstep, own_group: str, strategy: str, shape: Shape) -> None:
    """Rank 1 skips a call: the others name it at the deadline of a step. Rank 1 learns of it at its next call."""
    case = shape.make(Maker(lockstep.device, lockstep.ranks))
    cases.run_op(case, strategy, own_group, "fused.first")
    lockstep.sync()
    if lockstep.rank != 1:
        skipped = "fused.skipped"
        fails_within(lockstep, own_group, errors.PeerTimeoutError, lambda: cases.run_op(case, strategy, own_group, skipped))
    lockstep.barrier()
    if lockstep.rank == 1:

        def run_next() -> None:
            cases.run_op(case, strategy, own_group, "fused.next")
            lockstep.sync()
            session.check(own_group)

        with pytest.raises(errors.UbOverlapError):
            run_next()


@pytest.mark.deadline(150)
def test_compiled_layers(lockstep: Lockstep) -> None:
    """Under mode="reduce-overhead" every all_reduce is one kernel with residual and norm, and steps equal eager's."""
    torch._dynamo.reset()
    options: dict[str, Any] = {"overrides": [{"strategy": "one_shot"}]}
    if lockstep.cuda:
        inductor_graphs.reset()
        options["mode"] = "reduce-overhead"
    ops.extension().clear_stats()
    run: Any = torch.compile(fused_forms.two_layers, backend="ub_overlap", options=options)
    x, *rest = (t.to(lockstep.device) for t in rank_fused.inputs(lockstep.rank, lockstep.ranks, BF16))
    worst = 0.0
    for step in range(12):
        if lockstep.cuda:
            torch.compiler.cudagraph_mark_step_begin()
        rest[1] = rest[1] + step  # the residual, the same on all ranks
        with torch.no_grad():
            plain, exact = fused_forms.two_layers(x, *rest), fused_forms.two_layers(x.double(), *(t.double() for t in rest))
            ours = run(x, *rest).clone()
        far, limit = ((t.double() - exact).abs().max().item() for t in (ours, plain))
        assert far <= 2 * limit + 1e-2, f"step {step}: off by {far:.3g}, eager {limit:.3g}"
        worst = max(worst, far)
    lockstep.sync()
    session.check()
    used = [site for site in stats.site_stats().values() if site.strategy == "one_shot"]
    assert len(used) == 4, stats.site_stats()
    graphs = f", {inductor_graphs.count(lockstep.device)} graphs captured" if lockstep.cuda else ""
    lockstep.note(f"largest error {worst:.2g}{graphs}")


BATCHES = (8, 4, 2, 1)
"""The largest first, as servers capture them: the others then fit into the memory of the pool."""


class Batch:
    """The compiled layers at one batch: its static inputs, the results of each version of them, and on CUDA its graph."""

    def __init__(self, lockstep: Lockstep, run: Any, batch: int, pool: Any) -> None:
        self.args = [t.to(lockstep.device) for t in rank_fused.inputs(lockstep.rank, lockstep.ranks, BF16, batch)]
        self.run, self.graph, self.worst = run, None, 0.0
        self.residuals = [self.args[2] + version for version in range(VERSIONS)]
        self.expected = [self.checked(version) for version in range(VERSIONS)]
        lockstep.sync()
        lockstep.barrier()
        if lockstep.cuda:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
                self.out = run(*self.args)
            lockstep.sync()

    def checked(self, version: int) -> torch.Tensor:
        """Return the result of an eager call, which is as near to that in float64 as the model's own is."""
        self.args[2].copy_(self.residuals[version])
        ours = self.run(*self.args).clone()
        plain, exact = fused_forms.two_layers(*self.args), fused_forms.two_layers(*(t.double() for t in self.args))
        far, limit = ((t.double() - exact).abs().max().item() for t in (ours, plain))
        assert far <= 2 * limit + 1e-2, f"batch {len(self.args[2])}: off by {far:.3g}, eager {limit:.3g}"
        self.worst = max(self.worst, far)
        return ours

    def differs(self, version: int) -> torch.Tensor:
        """Replay the graph (CPU: call the compiled layers). Return whether the result is another than before."""
        self.args[2].copy_(self.residuals[version])
        if self.graph is None:
            return (self.run(*self.args) != self.expected[version]).any()
        self.graph.replay()
        found = (self.out != self.expected[version]).any()
        self.out.fill_(float("nan"))
        return found


@pytest.mark.deadline(250)
def test_a_graph_for_each_batch(lockstep: Lockstep) -> None:
    """As a server decodes: a graph for each batch, all in one pool of memory, replayed in random order, bitwise right."""
    torch._dynamo.reset()
    ops.extension().clear_stats()
    options: dict[str, Any] = {"overrides": [{"strategy": "one_shot"}]}
    run: Any = torch.compile(fused_forms.two_layers, backend="ub_overlap", dynamic=False, options=options)
    pool = torch.cuda.graph_pool_handle() if lockstep.cuda else None
    order = lockstep.shared_random(7)
    turns = 20 if not lockstep.cuda else 200 if lockstep.quick or lockstep.shares_gpu else 2_000
    wrong = torch.zeros((), dtype=torch.int64, device=lockstep.device)
    with torch.no_grad():
        batches = [Batch(lockstep, run, batch, pool) for batch in BATCHES]
        used = [site for site in stats.site_stats().values() if site.strategy == "one_shot"]
        assert len(used) == 4 * len(BATCHES), stats.site_stats()
        for turn in range(turns):
            wrong += order.choice(batches).differs(order.randrange(VERSIONS))
            if turn % 500 == 499:
                lockstep.sync()
                session.check()
    lockstep.sync()
    session.check()
    assert not int(wrong), f"{int(wrong)} of {turns} turns are wrong"
    lockstep.note(f"{turns} turns of {len(BATCHES)} batches, largest error {max(b.worst for b in batches):.2g}")
