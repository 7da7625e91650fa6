"""Numbers that the host reads for exchanges are read in one copy, behind what is sent; matmuls of a window come first."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import checkpoint

import ub_overlap
from benchmarks.expert_parallel.model import ROUTINGS, SIZES, ExpertLayer, make_routes
from tests.compiler.dags import Dag, aten, c10d
from tests.harness.ranks import RankPool
from tests.harness.tiers import full_but
from ub_overlap.compiler import passes
from ub_overlap.compiler.match.collectives import read_collective
from ub_overlap.compiler.windows.host_reads import _as_read, _emit, _find_together, _issue_compute_first
from ub_overlap.runtime.errors import UbOverlapError

ROWS, D = 6, 4
READ = "aten._local_scalar_dense.default"
START, FINISH, EXCHANGE = (
    "ub_overlap.start_host_read.default", "ub_overlap.finish_host_read.default", "_c10d_functional.all_to_all_single.default",
)  # fmt: skip


def exchange(rows: Tensor, got: list[int], sent: list[int]) -> Tensor:
    return funcol.all_to_all_single_autograd(rows, got, sent, dist.group.WORLD)  # type: ignore[arg-type]


def receive(counts: Tensor) -> Tensor:
    return funcol.all_to_all_single(counts, None, None, dist.group.WORLD)  # type: ignore[arg-type]


def all_at_once(x: Tensor, counts: Tensor, w: Tensor) -> Tensor:
    received = receive(counts)
    sent, got = counts.tolist(), received.tolist()
    rows = x.sin()
    return exchange(rows, got, sent).exp().sum(0) + (x @ w).sum(0)


def compute_behind_short_kernels(x: Tensor, counts: Tensor, w: Tensor) -> Tensor:
    received = receive(counts)
    landed = exchange(x.sin(), received.tolist(), counts.tolist())
    order = torch.argsort(x[:, 0])
    inner = (x * 2) @ w
    return landed.cos().sum(0) + inner[order][0]


def sums_of_parts(x: Tensor, counts: Tensor, w: Tensor) -> Tensor:
    """The host adds up parts of counts: elements of the rows of a matrix."""
    parts = torch.stack([counts // 2, counts - counts // 2], 1)
    sent, got = ([first + second for first, second in part.tolist()] for part in (parts, receive(parts)))
    return exchange(x.sin(), got, sent).sum(0)


def with_one_number_alone(x: Tensor, counts: Tensor, w: Tensor) -> Tensor:
    """All but one number are known, and x is an input: nothing is left for the device."""
    first = int(counts[0].item())
    torch._check(first >= 0)
    torch._check(first <= ROWS)
    half = exchange(x, receive(counts).tolist(), [first, ROWS - first])
    return half.sum(0)


def after_a_tensor_of_that_size(x: Tensor, counts: Tensor, w: Tensor) -> Tensor:
    """Between the reads, a tensor has a size that was read: two copies."""
    sent = counts.tolist()
    ones = torch.ones(sent[0]).sum()
    return exchange(x.sin(), receive(counts).tolist(), sent).sum(0) * ones


def written_in_between(x: Tensor, counts: Tensor, w: Tensor) -> Tensor:
    """Counts are written between the reads."""
    mine = counts.clone()
    sent = mine.tolist()
    mine.zero_()
    return exchange(x.sin(), receive(counts).tolist(), sent).sum(0) + mine.sum()


def read_twice(x: Tensor, counts: Tensor, w: Tensor) -> Tensor:
    """What is sent is read in front of the numbers too."""
    received = receive(counts)
    rows = x.sin()
    shared = torch.relu(rows @ w)
    return exchange(rows, received.tolist(), counts.tolist()).sum(0) + shared.sum(0)


def read_in_between(x: Tensor, counts: Tensor, w: Tensor) -> Tensor:
    """What is sent is read between the numbers and the exchange."""
    received, rows = receive(counts), x.sin()
    sent, got = counts.tolist(), received.tolist()
    more = rows.exp()
    return exchange(rows, got, sent).sum(0) + more.sum(0)


def sent_from_counts(x: Tensor, counts: Tensor, w: Tensor) -> Tensor:
    """What is sent is computed from the tensor that is read."""
    received = receive(counts) + 0
    rows = x * received.sum() + received[0]
    return exchange(rows, received.tolist(), counts.tolist()).sum(0)


def with_dropout(x: Tensor, counts: Tensor, w: Tensor) -> Tensor:
    """A checkpointed region feeds the exchange by a higher-order op: it saves the state of random numbers."""
    rows = checkpoint(lambda t: torch.dropout(t.sin(), 1e-9, True), x, use_reentrant=False)
    received = receive(counts)
    return exchange(rows, received.tolist(), counts.tolist()).sum(0)


def behind_a_gather(x: Tensor, counts: Tensor, w: Tensor) -> Tensor:
    """What is sent hides a gather: it stays in its window."""
    received = receive(counts)
    gathered = funcol.all_gather_tensor(w.detach(), 0, dist.group.WORLD)  # type: ignore[arg-type]
    rows = x.sin()
    y = gathered.sum(0)
    return exchange(rows, received.tolist(), counts.tolist()).sum(0) + y


def other_numbers(x: Tensor, counts: Tensor, w: Tensor) -> Tensor:
    """A number that no exchange needs is read where it was."""
    scale = counts.sum().item()
    return exchange((x * scale).sin(), [ROWS // 2, ROWS // 2], [ROWS // 2, ROWS // 2]).sum(0)


PROGRAMS: dict[str, tuple[Callable[..., Tensor], int]] = {
    "all at once": (all_at_once, 1),
    "compute": (compute_behind_short_kernels, 1),
    "sums": (sums_of_parts, 1),
    "one alone": (with_one_number_alone, 1),
    "tensor between": (after_a_tensor_of_that_size, 2),
    "written": (written_in_between, 1),
    "other": (other_numbers, 0),
    "read twice": (read_twice, 1),
    "read between": (read_in_between, 1),
    "from counts": (sent_from_counts, 1),
    "dropout": (with_dropout, 1),
    "gather": (behind_a_gather, 1),
}
"""Each with the number of copies."""


class Recorded:
    """The targets of the nodes of each graph as its sites are searched."""

    def __init__(self) -> None:
        self.graphs: list[list[str]] = []
        self._prepare = passes.prepare_sites

    def __enter__(self) -> Recorded:
        def recording(graph: Graph, *rest: Any) -> None:
            self._prepare(graph, *rest)
            graph.lint()
            self.graphs.append([str(node.target) for node in graph.nodes])

        passes.prepare_sites = recording
        return self

    def __exit__(self, *_: object) -> None:
        passes.prepare_sites = self._prepare


def run_program(rank: int, world: int, name: str, inner: str) -> tuple[list[str], bool]:
    """Return the targets of the forward graph, and whether results and gradients are those of eager code."""
    torch._dynamo.reset()
    torch._dynamo.config.capture_scalar_outputs = True
    program, _ = PROGRAMS[name]
    counts = torch.tensor([[4, 2], [1, 5]][rank])
    made = torch.Generator().manual_seed(rank)
    results = []
    with Recorded() as recorded:
        for step in (program, torch.compile(program, backend="ub_overlap", options={"inner": inner}, fullgraph=True)):
            x, w = (torch.randn(n, D, generator=made.manual_seed(n + 100 * rank)).requires_grad_() for n in (ROWS, D))
            for _ in range(2):
                out = step(x, counts, w)
                out.square().sum().backward()
            results.append([out.detach(), x.grad, *([] if w.grad is None else [w.grad])])
    close = all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(*results, strict=True))
    return recorded.graphs[0], close


SHORT = [
    *product(["all at once", "compute", "tensor between", "written", "other", "gather"], ["aot_eager"]),
    ("compute", "inductor"),
]


@pytest.mark.parametrize(
    ("name", "inner"),
    full_but(SHORT, product(PROGRAMS, ["aot_eager", "inductor"])),
)
def test_programs(pool2: RankPool, name: str, inner: str) -> None:
    for targets, close in pool2.run(run_program, name, inner):
        copies = PROGRAMS[name][1]
        assert close
        assert targets.count(START) == targets.count(FINISH) == copies
        if copies:
            assert targets.index(START) < targets.index(FINISH) < targets.index(READ)
        if name in ("all at once", "compute"):
            assert targets.index(START) < targets.index("aten.sin.default") < targets.index(FINISH), "the host waits first"
        if name == "gather":
            assert targets.index("aten.sin.default") < targets.index(FINISH)
            gather = targets.index("_c10d_functional.all_gather_into_tensor.default")
            assert gather < targets.index("aten.sin.default") < targets.index("aten.sum.dim_IntList", gather)
        if name == "compute":
            rows = [i for i, target in enumerate(targets) if target == EXCHANGE][1]
            order = [targets.index(f"aten.{name}") for name in ("mul.Tensor", "mm.default", "sort.default")]
            assert [rows, *order] == sorted([rows, *order])


def run_eager_and_compiled(
    rank: int, world: int, routing: str, options: dict[str, Any], halves: bool = False
) -> tuple[list[list[str]], list[tuple[Tensor, Tensor]]]:
    """Return the targets of both graphs of a layer with experts, and pairs of results and gradients: eager and compiled."""
    torch._dynamo.reset()
    torch._dynamo.config.capture_scalar_outputs = True
    torch.manual_seed(rank)
    sizes, tokens = SIZES["tiny"], 16 * (rank + 1)
    routes = make_routes(tokens, 2 * world, sizes.top, routing, rank)
    layer = ExpertLayer(sizes, 2, routes, dist.group.WORLD, True).bfloat16()
    if halves:
        ub_overlap.tokenwise(layer.block.experts, arguments=3)
    x = torch.randn(tokens, sizes.dim).bfloat16().requires_grad_()
    results = []
    with Recorded() as recorded:
        options = {"inner": "aot_eager", **options}
        for step in (layer, torch.compile(layer, backend="ub_overlap", options=options, fullgraph=True)):
            x.grad = None
            layer.zero_grad()
            out = step(x)
            out.square().sum().backward()
            results.append([out.detach(), x.grad, *(p.grad for p in layer.parameters())])
    return recorded.graphs, list(zip(*results, strict=True))


def run_layer(rank: int, world: int, routing: str, overlap: str) -> tuple[list[list[str]], list[bool]]:
    """Return the targets of both graphs, and which results and gradients equal eager's in bits."""
    graphs, pairs = run_eager_and_compiled(rank, world, routing, {"overlap": overlap})
    return graphs, [torch.equal(a, b) for a, b in pairs]


@pytest.mark.parametrize("routing", full_but(["skewed"], ROUTINGS))
def test_layer(pool2: RankPool, routing: str) -> None:
    """The four numbers of a layer with experts on two ranks are one copy; backward reads none."""
    for (forward, backward), equal in pool2.run(run_layer, routing, "force"):
        assert forward.count(START) == 1 and forward.count(READ) == 4
        between = forward[forward.index(START) : forward.index(FINISH)]
        assert "aten.index.Tensor" in between, "the sorted rows are not issued before the host waits"
        assert START not in backward and READ not in backward
        assert all(equal), equal


def run_halves(rank: int, world: int, inner: str) -> tuple[list[str], list[float]]:
    """Return the targets of the forward graph of a layer in two halves, and errors of results and gradients against eager."""
    options = {"inner": inner, "split_tokens": "force", "profile": "h200", "min_bytes": 0}
    graphs, pairs = run_eager_and_compiled(rank, world, "skewed", options, halves=True)
    return graphs[0], [float((a - b).abs().max() / a.abs().max()) for a, b in pairs]


@pytest.mark.tier("full")
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_two_halves(pool2: RankPool, inner: str) -> None:
    """The counts of both halves are exchanged and read in front of both dispatches: the host waits once."""
    for forward, errors in pool2.run(run_halves, inner, timeout=300):
        assert forward.count(START) == 1 and forward.count(READ) == 8
        assert [i < forward.index(START) for i, target in enumerate(forward) if target == EXCHANGE] == [True] * 2 + [False] * 4
        assert max(errors) < 2e-2, errors  # gradients are sums of two parts in bf16


def test_off(pool2: RankPool) -> None:
    for graphs, equal in pool2.run(run_layer, "balanced", "off"):
        assert all(START not in targets for targets in graphs) and all(equal)


@pytest.mark.parametrize(
    ("dtype", "size", "device", "source"),
    [
        (torch.int64, 2, "cpu", "counts"),
        (torch.int32, 2, "cpu", "counts"),
        (torch.int64, 2, "meta", "copy"),
        (torch.int64, 8192, "cpu", None),
        (torch.float32, 2, "cpu", None),
    ],
)
def test_what_is_read(dtype: torch.dtype, size: int, device: str, source: str | None) -> None:
    """Elements of small tensors of integers. A copy on the host stands for what it copies, not one on another device."""
    graph = Graph()
    with FakeTensorMode():
        values = torch.empty(size, dtype=dtype, device="cuda"), torch.empty(size, dtype=dtype, device=device)
        value_of_element = torch.empty((), dtype=dtype, device=device)
    counts = graph.placeholder("counts")
    copy = graph.call_function(torch.ops.aten._to_copy.default, (counts,), {"device": torch.device(device)})
    element = graph.call_function(torch.ops.aten.select.int, (copy, 0, -1))
    read: Node = graph.call_function(torch.ops.aten._local_scalar_dense.default, (element,))
    for node, value in zip((counts, copy, element), (*values, value_of_element), strict=True):
        node.meta["val"] = value
    found = _as_read(read)
    assert (found and (found.source is (counts if source == "counts" else copy), found.index)) == (source and (True, size - 1))


@pytest.mark.parametrize("written_at", ["first", "between", "copied"])
def test_writes(written_at: str) -> None:
    """Reads stay on their side of a write. A copy on the host is as old as it was."""
    graph, reads = Graph(), list[Node]()
    ops = torch.ops.aten
    with FakeTensorMode():
        value = torch.empty(4, dtype=torch.int64)

    def call(target: Any, *args: Any, val: Any = value, **kwargs: Any) -> Node:
        node = graph.call_function(target, args, kwargs)
        node.meta["val"] = val
        return node

    def read(source: Node, *places: int) -> None:
        for place in places:
            element = call(ops.select.int, source, 0, place, val=value[0])
            reads.append(call(ops._local_scalar_dense.default, element, val=None))

    counts = graph.placeholder("counts")
    counts.meta["val"] = value
    if written_at == "between":
        read(counts, 0, -1)
    if written_at == "copied":
        with FakeTensorMode():
            counts.meta["val"] = torch.empty(4, dtype=torch.int64, device="cuda")
        copied = call(ops._to_copy.default, counts, device=torch.device("cpu"))
    call(ops.zero_.default, counts)
    read(copied if written_at == "copied" else counts, 1, 2)
    graph.output(tuple(reads))
    given = torch.tensor([4, 2, 3, 1])
    expected = GraphModule(torch.nn.Module(), graph)(given.clone())
    for together in (sets := _find_together(graph, set(reads))):
        assert _emit(graph, together, []) == 2
    assert len(sets) == (2 if written_at == "between" else 1)
    graph.lint()
    assert GraphModule(torch.nn.Module(), graph)(given.clone()) == expected
    assert not _find_together(graph, set(reads)), "what was read together is not read again"


def test_elements_of_a_matrix() -> None:
    """Nested elements are those of the whole tensor in a row: one source."""
    graph = Graph()
    with FakeTensorMode():
        value = torch.empty(2, 3, 4, dtype=torch.int32)
    counts = graph.placeholder("counts")
    counts.meta["val"] = value
    given = torch.arange(24).view(2, 3, 4)
    for places in ([(0, 1), (0, 2), (0, 3)], [(1, -1), (1, 0), (0, 1)], [(-1, 2), (0, -1), (-1, 1)]):
        node, element = counts, given
        for dim, place in places:
            node, element = graph.call_function(torch.ops.aten.select.int, (node, dim, place)), element.select(dim, place)
        found = _as_read(graph.call_function(torch.ops.aten._local_scalar_dense.default, (node,)))
        assert found is not None and found.source is counts and found.index == element.item()


@pytest.mark.parametrize("waits", [1, 2])
def test_matmuls_in_front_of_another_wait(waits: int) -> None:
    """Matmuls move behind the exchange of the second half, in front of the wait for the first half and of short kernels; none
    that needs what one of the two brings."""
    d = Dag()
    x, w = d.input("x", 8, 8), d.input("w", 8, 8)
    exchanges = []
    for _ in range(2):
        exchanges.append(d.graph.call_function(c10d.all_to_all_single.default, (x, [4, 4], [4, 4], d.group)))
        exchanges[-1].meta["val"] = x.meta["val"]
    landed = [d.call(c10d.wait_tensor.default, c) for c in exchanges[:waits]]
    short = d.call(aten.relu.default, x)
    shared = d.mm(x, w)
    experts = d.mm(landed[0], w)
    last = d.mm(x, short)
    landed += [d.call(c10d.wait_tensor.default, c) for c in exchanges[waits:]]
    d.output(*landed, experts, shared, last)
    second = read_collective(exchanges[1])
    assert _issue_compute_first(second) == 1
    d.graph.lint()
    order = list(d.graph.nodes)
    assert order[order.index(exchanges[1]) + 1] is shared
    assert order.index(short) < order.index(experts) < order.index(last)


def test_ops() -> None:
    ops = torch.ops.ub_overlap
    counts = torch.tensor([[3, 1], [4, 1]])
    sources = [counts[:, 0], counts[1].int(), torch.tensor(7)]
    read = ops.start_host_read(sources)
    assert ops.finish_host_read(read, [counts]).tolist() == [3, 4, 4, 1, 7]
    with pytest.raises(UbOverlapError, match="no start_host_read"):
        ops.finish_host_read(read, [])
    torch.library.opcheck(ops.start_host_read.default, (sources,))
    with FakeTensorMode() as mode:
        assert ops.finish_host_read(mode.from_tensor(read), []).shape == read.shape
