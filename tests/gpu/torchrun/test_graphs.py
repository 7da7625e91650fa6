"""CUDA graphs: captures on all ranks, replays with changing inputs, eager calls between them, two graphs in alternation, and
compiled models whose graphs torch captures.

"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.gpu import captures as inductor_graphs
from tests.gpu.cases import BF16, Maker, differs
from tests.gpu.lockstep import Lockstep
from tests.harness.later_steps import compiled_before
from tests.harness.traces import as_loss
from tests.models.megatron import MLP, Mappings
from ub_overlap.runtime import ops, settings, stats
from ub_overlap.runtime.session import session


class Layer:
    """all_gather_matmul, then matmul_reduce_scatter, on fixed weights; `static` is what a graph reads."""

    def __init__(self, lockstep: Lockstep, group: str, name: str, rows: int, wide: int) -> None:
        make = Maker(lockstep.device, lockstep.ranks)
        self.up, self.down = make.randn(512, wide, dtype=BF16, scale=0.1), make.randn(wide, 512, dtype=BF16, scale=0.1)
        self.static = make.randn(1, rows, 512, dtype=BF16)
        self.group, self.name = group, name
        self.inputs = [make.randn(1, rows, 512, dtype=BF16) for _ in range(7)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        ub = torch.ops.ub_overlap
        _, (h,) = ub.all_gather_matmul(
            x, [self.up], [False], [False], 1, False, False, [], [], "pipelined", self.group, f"{self.name}.ag"
        )
        scattered = ub.matmul_reduce_scatter(
            [h], [self.down], None, 1, False, "sum", BF16, False, "plain", [], [], "pipelined", self.group, f"{self.name}.rs"
        )
        return scattered[0]

    def expect(self, lockstep: Lockstep) -> list[torch.Tensor]:
        found = []
        for x in self.inputs:
            found.append(self(x).clone())
            lockstep.sync()
        session.check(self.group)
        return found

    def capture(self, lockstep: Lockstep) -> tuple[Any, torch.Tensor]:
        """Return the graph and its output. Capturing runs nothing, so no rank waits for another."""
        self(self.static)
        lockstep.sync()
        lockstep.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = self(self.static)
        lockstep.sync()
        lockstep.barrier()
        return graph, out


def alternate(lockstep: Lockstep, group: str, layers: int, count: int, eager: bool) -> str:
    """Replay graphs alternately with changing inputs. `eager`: every third call is eager instead."""
    made = [Layer(lockstep, group, f"graph{i}", 64 * (i + 1), 256 + 128 * i) for i in range(layers)]
    expected = [layer.expect(lockstep) for layer in made]
    captured = [layer.capture(lockstep) for layer in made]
    wrong = torch.zeros(count, dtype=torch.bool, device=lockstep.device)
    clock = time.monotonic()
    for turn in range(count):
        which, version = turn % layers, (turn * 3 + turn // 5) % 7
        layer, (graph, out) = made[which], captured[which]
        if eager and turn % 3 == 2:
            got = layer(layer.inputs[version])
        else:
            layer.static.copy_(layer.inputs[version])
            graph.replay()
            got = out
        wrong[turn] = differs([got], [expected[which][version]])
        if turn % 250 == 249:
            lockstep.sync()
            session.check(group)
    lockstep.sync()
    session.check(group)
    bad = wrong.nonzero().flatten().tolist()
    if bad:
        raise AssertionError(f"{len(bad)} of {count} turns are wrong, the first {bad[:5]}")
    del captured
    return f"{count} turns in {time.monotonic() - clock:.1f} s, bitwise"


def replay_and_eager_call(lockstep: Lockstep, group: str, count: int) -> str:
    """An eager call on one stream waits for a running replay on another."""
    make = Maker(lockstep.device, lockstep.ranks)
    weight = make.randn(8192, 8192, dtype=BF16, scale=0.02)  # a call of milliseconds, longer than the skew between ranks
    static, inputs = make.randn(1, 4096, 8192, dtype=BF16), [make.randn(1, 4096, 8192, dtype=BF16) for _ in range(3)]

    def call(x: torch.Tensor, site: str) -> torch.Tensor:
        gathered = torch.ops.ub_overlap.all_gather_matmul(
            x, [weight], [False], [False], 1, False, False, [], [], "pipelined", group, site
        )
        return gathered[1][0]

    expected = []
    for x in inputs:
        expected.append(call(x, "concurrent").clone())
        lockstep.sync()
    graph = torch.cuda.CUDAGraph()
    number, begun = torch.zeros(1, device=lockstep.device), torch.zeros(1, pin_memory=True)
    lockstep.barrier()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        begun.copy_(number, non_blocking=True)
        out = call(static, "concurrent.graph")
    lanes = [torch.cuda.Stream() for _ in range(2)]
    wrong, met = 0, 0
    for turn in range(count):
        a, b = turn % 3, (turn * 2 + 1) % 3
        static.copy_(inputs[a])
        number.fill_(turn + 1)
        lockstep.sync()
        lockstep.barrier()
        with torch.cuda.stream(lanes[0]):
            graph.replay()
        give_up = time.monotonic() + 10
        while begun.item() != turn + 1:  # all ranks must run the replay first
            assert time.monotonic() < give_up, "the replay does not begin"
        time.sleep(0.0005)
        with torch.cuda.stream(lanes[1]):
            eager = call(inputs[b], "concurrent")
        met += not lanes[0].query()
        lockstep.sync()
        session.check(group)
        wrong += bool(differs([out, eager], [expected[a], expected[b]]))
    if wrong or not met:
        raise AssertionError(f"{wrong} of {count} turns are wrong; {met} replays still ran when the plain call came")
    return f"{count} turns, {met} replays still ran when the plain call came, bitwise"


def two_threads(lockstep: Lockstep, group: str, count: int) -> str:
    """One thread captures calls of a group while another makes eager calls of a second group."""
    settings.configure(replay=False)  # torch synchronizes the device at every capture, which no recording survives
    mine, other = Layer(lockstep, group, "captures", 64, 256), Layer(lockstep, lockstep.new_group(), "plain", 96, 384)
    expected, plain = mine.expect(lockstep), other.expect(lockstep)
    wrong = torch.zeros(count, dtype=torch.bool, device=lockstep.device)
    failed: list[BaseException] = []

    def calls() -> None:
        try:
            torch.cuda.set_device(lockstep.device)
            with torch.cuda.stream(torch.cuda.Stream()):
                for turn in range(count):
                    wrong[turn] = differs([other(other.inputs[turn % 7])], [plain[turn % 7]])
                torch.cuda.current_stream().synchronize()
        except BaseException as error:  # noqa: BLE001  (told by the row)
            failed.append(error)

    thread = threading.Thread(target=calls, daemon=True)
    thread.start()
    graphs = 0
    while thread.is_alive() or graphs == 0:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = mine(mine.static)
        graphs += 1
        time.sleep(0.001)
    thread.join(60)
    if failed:
        raise failed[0]
    lockstep.sync()
    lockstep.barrier()
    for version in range(7):
        mine.static.copy_(mine.inputs[version])
        graph.replay()
        if differs([out], [expected[version]]):
            raise AssertionError(f"the replay of input {version} is wrong")
    lockstep.sync()
    session.check()
    bad = wrong.nonzero().flatten().tolist()
    if bad:
        raise AssertionError(f"{len(bad)} of {count} plain calls are wrong, the first {bad[:5]}")
    settings.configure(replay=True)
    return f"{graphs} captures and {count} eager calls, bitwise"


class Model(nn.Module):
    """Two tensor-parallel MLPs, sequence-parallel between them."""

    def __init__(self, world: int, dim: int, hidden: int) -> None:
        super().__init__()
        ends = Mappings("functional", 0, str(dist.group.WORLD.group_name))  # type: ignore[union-attr]
        self.layers = nn.ModuleList(MLP(dim, -(-hidden // world), ends, True, False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def compiled(lockstep: Lockstep, steps: int, kwargs: dict[str, Any], captures: bool) -> str:
    """Run forward and backward of a compiled model `steps` times: results equal eager. `captures`:
    torch must have captured graphs, and skipped none. Sites this small are overlapped where options force them."""
    torch._dynamo.reset()
    if captures:
        inductor_graphs.reset()
    ops.extension().clear_stats()
    rows, dim, hidden = (1024, 1024, 2048) if lockstep.cuda else (32, 64, 128)  # above min_bytes on GPUs
    torch.manual_seed(3 + lockstep.rank)
    with torch.device(lockstep.device):
        eager, ours = Model(lockstep.ranks, dim, hidden), Model(lockstep.ranks, dim, hidden)
    ours.load_state_dict(eager.state_dict())
    run: Any = torch.compile(ours, backend="ub_overlap", **kwargs)
    worst = 0.0
    for step in range(steps):
        if lockstep.cuda:
            torch.compiler.cudagraph_mark_step_begin()
        generator = torch.Generator(lockstep.device).manual_seed(100 * step + lockstep.rank)
        results = []
        for module, call in ((eager, eager), (ours, run)):
            generator.manual_seed(100 * step + lockstep.rank)
            x = torch.randn(rows // lockstep.ranks, 1, dim, device=lockstep.device, generator=generator).requires_grad_()
            with compiled_before(step):
                out = call(x)
                as_loss(out).backward()
            results.append([out.detach().clone(), x.grad, *(p.grad.clone() for p in module.parameters())])  # type: ignore[union-attr]
            module.zero_grad(set_to_none=True)
        for a, b in zip(*results, strict=True):
            error = ((a - b).abs().max() / a.abs().max().clamp(min=1e-6)).item()
            worst = max(worst, error)
            if not error < 2e-5:
                raise AssertionError(f"step {step}: off by {error:.3g} of the largest value")
    lockstep.sync()
    session.check()
    used = [s for s in stats.site_stats().values() if s.calls and s.strategy.startswith("pipelined")]
    if not used and "options" in kwargs:
        raise AssertionError("no site was overlapped")
    note = f"{steps} steps, error {worst:.2g}, {len(used)} sites"
    if not captures:
        return note
    return f"{note}, {inductor_graphs.count(lockstep.device)} graphs captured"


needs_cuda_graphs = "the CPU has no graphs"


@pytest.mark.parametrize("eager", [False, True], ids=["replays", "replays and eager calls"])
@pytest.mark.parametrize("graphs", [1, 2])
def test_replays(lockstep: Lockstep, group: str, graphs: int, eager: bool) -> None:
    if not lockstep.cuda:
        pytest.skip(needs_cuda_graphs)
    lockstep.note(alternate(lockstep, group, graphs, 200 if lockstep.quick else 1000, eager))


@pytest.mark.own_gpus("the device may run the eager call of one rank before the replay")
def test_a_replay_concurrent_with_an_eager_call(lockstep: Lockstep, group: str) -> None:
    if not lockstep.cuda:
        pytest.skip(needs_cuda_graphs)
    lockstep.note(replay_and_eager_call(lockstep, group, 20))


def test_captures_and_eager_calls_of_two_threads(lockstep: Lockstep, group: str) -> None:
    if not lockstep.cuda:
        pytest.skip(needs_cuda_graphs)
    lockstep.note(two_threads(lockstep, group, 200))


COMPILED = [
    pytest.param({"options": {"overlap": "force"}}, False, marks=pytest.mark.full, id="no graphs"),
    pytest.param({"options": {"overlap": "force", "triton.cudagraphs": True}}, True, id="triton.cudagraphs"),
    pytest.param(
        {"options": {"overlap": "force", "mode": "reduce-overhead"}},
        True,
        marks=pytest.mark.full,
        id="options mode reduce-overhead",
    ),
    pytest.param({"mode": "reduce-overhead"}, True, marks=pytest.mark.full, id="mode=reduce-overhead"),
]


@pytest.mark.deadline(150)
@pytest.mark.parametrize(("kwargs", "captures"), COMPILED)
def test_compiled(lockstep: Lockstep, kwargs: dict[str, Any], captures: bool) -> None:
    if captures and not lockstep.cuda:
        pytest.skip(needs_cuda_graphs)
    lockstep.note(compiled(lockstep, 20, kwargs, captures))
