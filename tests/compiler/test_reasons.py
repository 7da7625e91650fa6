"""Each Reason, on a graph that torch traced: a collective that is left alone reports the exact reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph

from tests.compiler.dags import Dag
from tests.compiler.rank_compile import FUSED, build, decisions_of, since, world_name
from tests.harness.fake_ranks import FakeRanks
from tests.harness.ranks import RankPool
from tests.harness.traces import capture
from tests.models.compare import compare
from tests.models.forms import FORMS
from ub_overlap.compiler.options import parse
from ub_overlap.compiler.plan.decision import Decision
from ub_overlap.compiler.plan.reasons import Reason
from ub_overlap.compiler.select import peak_memory
from ub_overlap.compiler.select.decide import decide

c10d = torch.ops._c10d_functional
R = Reason
FORM_REASONS: dict[str, tuple[Reason | None, Reason | None]] = {
    "gather_bmm": (R.LAYOUT, R.LAYOUT),
    "gather_cast": (None, R.CAST_IN_BETWEEN),
    "gather_permuted": (R.SHARD_ORDER, R.SHARD_ORDER),
    "gather_wrong_bounds": (R.SHARD_ORDER, R.UNEVEN_SHARDS),
    "gather_shifted": (R.SHARD_ORDER, None),
    "gather_trimmed": (R.UNEVEN_SHARDS, R.UNEVEN_SHARDS),
    "gather_trimmed_rows": (R.UNEVEN_SHARDS, R.UNEVEN_SHARDS),
    "gather_squared": (R.DEPENDENT_OPERAND, None),
    "gather_without_matmul": (R.NO_MATMUL, R.NO_MATMUL),
    "relu_scatter": (R.NON_LINEAR, R.NON_LINEAR),
    "scatter_permuted": (R.SHARD_ORDER, R.SHARD_ORDER),
    "scatter_wrong_bounds": (R.SHARD_ORDER, R.NO_MATMUL),
    "scatter_padded": (R.UNEVEN_SHARDS, R.UNEVEN_SHARDS),
}
"""Reasons by form why the forward and the backward collective are not pipelined (None: only results are checked)."""


def why(d: dict[str, Any]) -> str:
    """Return the reason of a decision, also if the collective runs with independent matmuls (bulk)."""
    return d["reason"] or d["detail"].removeprefix("not pipelined: ").partition(":")[0]


@pytest.mark.parametrize("name", FORM_REASONS)
def test_form_is_refused(pool2: RankPool, name: str) -> None:
    """A form that resembles a site is refused with its reason.

    Other implementations compute wrong results for some of these.
    """
    for outcome in pool2.run(compare, "tests.models.forms", {"name": name}, FUSED):
        outcome.check()
        for phase, reason in zip(("forward", "backward"), FORM_REASONS[name], strict=True):
            if reason is not None:
                assert [why(d) for d in outcome.decisions if d["phase"] == phase] == [reason.value]


@pytest.mark.tier("full")
def test_gathered_logits(pool2: RankPool) -> None:
    """A gather of what a matmul made says how to do without it; one of an activation does not."""
    for module, variant, says in (
        ("tests.models.dtensor_llama", {"head": "logits"}, True),
        ("tests.models.forms", {"name": "gather_without_matmul"}, False),
    ):
        for outcome in pool2.run(compare, module, variant, FUSED):
            outcome.check()
            unmatched = [d for d in outcome.decisions if d["kind"] == "all_gather" and why(d) == Reason.NO_MATMUL.value]
            assert [d["phase"] for d in unmatched if "loss_parallel" in d["detail"]] == (["forward"] if says else [])
            assert unmatched


class Maker:
    """Tensors and collectives of one rank."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.group = world_name()

    def x(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))

    def gather(self, x: Tensor, group: Any = None) -> Tensor:
        return funcol.all_gather_tensor(x, 0, group or self.group)

    def scatter(self, x: Tensor) -> Tensor:
        return funcol.reduce_scatter_tensor(x, "sum", 0, self.group)


Case = tuple[Callable[..., Any], tuple[Tensor, ...], dict[str, Any]]


def gather_mm(m: Maker, group: Any = None, **options: Any) -> Case:
    return (lambda x, w: m.gather(x, group) @ w), (m.x(8, 64), m.x(64, 48)), {**FUSED, **options}


def scatter_of(m: Maker, function: Callable[..., Tensor], *extra: Tensor) -> Case:
    return (lambda x, w, *e: m.scatter(function(x @ w, *e))), (m.x(8 * m.world, 32), m.x(32, 64), *extra), FUSED


def off(m: Maker) -> Case:
    return gather_mm(m, overlap="off")


def plan_says_none(m: Maker) -> Case:
    return gather_mm(m, overrides={"forward.0": "none"})


def gather_in_stripes(m: Maker) -> Case:
    return gather_mm(m, overrides={"forward.0": "pipelined:stripes=2"})


def last_dim_in_stripes(m: Maker) -> Case:
    """A scatter of columns, whose shards are not blocks of rows."""
    function = lambda x, w: funcol.reduce_scatter_tensor(x @ w, "sum", 1, m.group)  # noqa: E731
    return function, (m.x(16, 32), m.x(32, 8 * m.world)), {**FUSED, "overrides": {"forward.0": "pipelined:stripes=2"}}


def scatter_by_engine(m: Maker) -> Case:
    """Nothing is gathered that could be kept."""
    function, inputs, _ = last_dim_in_stripes(m)
    return function, inputs, {**FUSED, "overrides": {"forward.0": "pipelined:copies=engine"}}


def gather_direct(m: Maker) -> Case:
    return gather_mm(m, overrides={"forward.0": "8=pipelined;*=direct"})


def last_dim_direct(m: Maker) -> Case:
    function, inputs, _ = last_dim_in_stripes(m)
    return function, inputs, {**FUSED, "overrides": {"forward.0": "direct"}}


def sum_direct(m: Maker) -> Case:
    """A scatter of a sum of two products, which may not become one."""
    function = lambda x, w, v: m.scatter(x @ w + x @ v)  # noqa: E731
    inputs = (m.x(8 * m.world, 32), m.x(32, 64), m.x(32, 64))
    return function, inputs, {**FUSED, "pack": "off", "overrides": {"forward.0": "direct"}}


def kept_direct(m: Maker) -> Case:
    """A scatter of a product that is returned as well."""

    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        product = x @ w
        return m.scatter(product), product

    return function, (m.x(8 * m.world, 32), m.x(32, 64)), {**FUSED, "overrides": {"forward.0": "direct"}}


def direct_without_own(m: Maker) -> Case:
    """A collective without a matmul of its own, next to an independent one."""
    function, inputs, options = pipelined_without_own(m)
    return function, inputs, {**options, "overrides": {"forward.0": "direct"}}


def bulk_without_independent(m: Maker) -> Case:
    """A gather whose own matmul could hide it."""
    return gather_mm(m, overrides={"forward.0": "bulk"})


def pipelined_without_own(m: Maker) -> Case:
    """A gather without a matmul of its own, which an independent one could hide."""
    options = {**FUSED, "overrides": {"forward.0": "pipelined"}}
    return (lambda x, w: (m.gather(x).relu(), x @ w)), (m.x(8, 64), m.x(64, 48)), options


def small(m: Maker) -> Case:
    return gather_mm(m, overlap="auto", min_bytes=8 * 64 * 4 + 1)


def no_gain(m: Maker) -> Case:
    """A matmul that an H200 finishes long before its first push has arrived."""
    return gather_mm(m, overlap="auto", min_bytes=0, profile="h200")


def one_rank(m: Maker) -> Case:
    mesh = DeviceMesh("cpu", torch.arange(m.world).view(m.world, 1), mesh_dim_names=("dp", "tp"))
    group = mesh["tp"].get_group().group_name
    return (lambda x, w: funcol.wait_tensor(c10d.all_gather_into_tensor(x, 1, group)) @ w), (m.x(8, 64), m.x(64, 48)), FUSED


def no_transport(m: Maker) -> Case:
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend)

    return gather_mm(m, dist.new_group(list(range(m.world)), backend="fake").group_name)


def query_key_value(m: Maker) -> Case:
    """Columns that are gathered and cut into three (Phi 3). Nothing is trimmed, and no matmul reads a piece."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        full = funcol.all_gather_tensor(x, 1, m.group)
        return full[:, :16].relu(), full[:, 16:24].relu(), full[:, 24:].relu()

    return function, (m.x(8, 64),), FUSED


def gate_and_up(m: Maker) -> Case:
    """Each half of the gathered columns is the operand of a matmul."""

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        gate, up = funcol.all_gather_tensor(x, 1, m.group).chunk(2, 1)
        return gate @ w, up @ w

    return function, (m.x(8, 64), m.x(64 * m.world // 2, 16)), FUSED


def trimmed_at_both_ends(m: Maker) -> Case:
    """Two slices that leave a row out between them."""
    return (lambda x: (lambda full: (full[:3], full[4:]))(m.gather(x))), (m.x(8, 64),), FUSED


def float64(m: Maker) -> Case:
    return (lambda x, w: m.gather(x) @ w), (m.x(8, 64).double(), m.x(64, 48).double()), FUSED


def maximum(m: Maker) -> Case:
    return (lambda x, w: funcol.all_reduce(x @ w, "max", m.group)), (m.x(16, 32), m.x(32, 64)), FUSED


def broadcast(m: Maker) -> Case:
    return (lambda x, w: funcol.broadcast(x, 0, m.group) @ w), (m.x(8, 64), m.x(64, 48)), FUSED


def all_to_all(m: Maker) -> Case:
    """It has no fused form, and overlap="force" asks for fused forms."""
    return (lambda x, w: funcol.all_to_all_single(x, None, None, m.group) @ w), (m.x(8, 64), m.x(64, 48)), FUSED


def narrowed(m: Maker) -> Case:
    return scatter_of(m, lambda y: y.bfloat16())


def summed_wider(m: Maker) -> Case:
    """A gradient of the second microbatch under autocast: the product is widened and added to the first one."""
    operands = (m.x(8 * m.world, 32).bfloat16(), m.x(32, 64).bfloat16(), m.x(8 * m.world, 64))
    return (lambda x, w, before: m.scatter(before + (x @ w).float())), operands, FUSED


def scaled(m: Maker) -> Case:
    return scatter_of(m, lambda y, s: y * s, m.x(64))


def product_repeated(m: Maker) -> Case:
    return scatter_of(m, lambda y, c: (y + c).flatten(0, 1), m.x(2, 8 * m.world, 1))


def taken(m: Maker) -> Case:
    """One matmul between a gather and a scatter, which can hide only one of them."""
    return (lambda x, w: m.scatter(m.gather(x) @ w)), (m.x(8, 64), m.x(64, 48)), FUSED


def unbacked(m: Maker) -> Case:
    """A data-dependent size."""
    return (lambda x, w: m.gather(x.nonzero().float()) @ w), (torch.eye(6), m.x(2, 48)), FUSED


SITUATIONS: dict[Callable[[Maker], Case], Reason] = {
    off: R.DISABLED_BY_USER,
    plan_says_none: R.DISABLED_BY_USER,
    gather_in_stripes: R.STRATEGY_ILLEGAL,
    last_dim_in_stripes: R.STRATEGY_ILLEGAL,
    scatter_by_engine: R.STRATEGY_ILLEGAL,
    gather_direct: R.STRATEGY_ILLEGAL,
    last_dim_direct: R.STRATEGY_ILLEGAL,
    sum_direct: R.STRATEGY_ILLEGAL,
    kept_direct: R.STRATEGY_ILLEGAL,
    direct_without_own: R.STRATEGY_ILLEGAL,
    bulk_without_independent: R.STRATEGY_ILLEGAL,
    pipelined_without_own: R.STRATEGY_ILLEGAL,
    small: R.BELOW_THRESHOLD,
    no_gain: R.NO_GAIN,
    one_rank: R.TRIVIAL_GROUP,
    no_transport: R.NO_TRANSPORT,
    query_key_value: R.NO_MATMUL,
    gate_and_up: R.LAYOUT,
    trimmed_at_both_ends: R.UNEVEN_SHARDS,
    float64: R.DTYPE_UNSUPPORTED,
    maximum: R.REDUCE_OP_UNSUPPORTED,
    broadcast: R.COLLECTIVE_UNSUPPORTED,
    all_to_all: R.NO_MATMUL,
    narrowed: R.CAST_IN_BETWEEN,
    summed_wider: R.CAST_IN_BETWEEN,
    scaled: R.SCALE_NOT_CONSTANT,
    product_repeated: R.BROADCAST_SUM,
    taken: R.MATMUL_TAKEN,
    unbacked: R.DYNAMIC_SHAPE,
}


def situation(rank: int, world: int, name: str) -> Decision:
    """Return the last collective's decision."""
    function, inputs, options = globals()[name](Maker(rank, world))
    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        return decisions_of(function, inputs, options)[-1]


UNBACKED = since((2, 12), "Dynamo cannot trace a gather of a size that only the data tells")


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    "make", [pytest.param(f, marks=UNBACKED) if f is unbacked else f for f in SITUATIONS], ids=lambda f: f.__name__
)
def test_situation(fake2: FakeRanks, pool2: RankPool, make: Callable[[Maker], Case]) -> None:
    ranks = pool2 if make is no_transport else fake2  # that of a fake group needs ranks that exist
    for decision in ranks.run(situation, make.__name__):
        assert decision.reason is SITUATIONS[make], decision
        assert str(decision.strategy) == "none"
        assert decision.detail


def group_in_graph(rank: int, world: int) -> list[Decision]:
    """Return decisions for a group that comes from a mesh inside the graph, shared by all ranks."""
    m, mesh = Maker(rank, world), DeviceMesh("cpu", torch.arange(world), mesh_dim_names=("tp",))
    with torch.no_grad(), torch.distributed.config.patch(compile_on_one_rank=True):
        return decisions_of(lambda x, w: m.gather(x, (mesh, 0)) @ w, (m.x(8, 64), m.x(64, 48)))


@since((2, 12), "groups are no values of a graph yet")
def test_group_in_graph(pool2: RankPool) -> None:
    for decisions in pool2.run(group_in_graph):
        assert [d.reason for d in decisions] == [R.GROUP_NOT_STATIC]


def with_write(rank: int, world: int) -> list[Decision]:
    """Return decisions for a graph with a write between the gather and its matmul, as from a user's pass."""
    graph: Graph = capture(build(rank, world, "tests.models.forms", {"name": "gather_mm"}))[0].module.graph
    matmul = next(n for n in graph.nodes if n.target is torch.ops.aten.mm.default)
    weight = next(n for n in graph.nodes if n.op == "placeholder")
    with graph.inserting_before(matmul):
        graph.call_function(torch.ops.aten.add_.Tensor, (weight, 1))
    return list(decide(graph, parse(FUSED, frozenset())[0], "forward", lambda *_: None).plan.decisions)


@pytest.mark.tier("test")
def test_write_between(fake2: FakeRanks) -> None:
    for decisions in fake2.run(with_write):
        assert [d.reason for d in decisions] == [R.MUTATION_BARRIER]


def _held(deep: int) -> Dag:
    """Return a graph with a matmul [8192, deep] @ [deep, 8192] that is independent of a later gather.

    Overlapping the two keeps the matmul's operand alive while `big` is.
    """
    d = Dag(8)
    x, w, late = d.input("x", 8192, deep), d.input("primals_w", deep, 8192), d.input("late", 1024, 8192)
    product = d.mm(x, w)
    big = d.call(torch.ops.aten.cat.default, [w, w])
    d.output(product, big, d.gather(d.call(torch.ops.aten.add.Tensor, late, late)))
    return d


def test_memory_must_be_worth_it() -> None:
    """Bulk is refused if the extra peak memory costs more time than the overlap saves.

    Moving 128 MiB takes longer than the hidden gather; moving 32 MiB takes less.
    """
    options = parse({"profile": "h200", "min_bytes": 0}, frozenset())[0]
    (cheap,) = decide(_held(2048).graph, options, "backward", lambda *_: None).plan.decisions
    (dear,) = decide(_held(8192).graph, options, "backward", lambda *_: None).plan.decisions
    assert str(cheap.strategy) == "bulk" and cheap.pairing and cheap.pairing.peak_bytes == 32 << 20, cheap
    assert dear.reason is R.MEMORY and "128 MiB more at the peak are worth" in dear.detail, dear
    assert dear.pairing and dear.pairing.saves_us > 200 and dear.pairing.own_us is None
    assert f"{128 << 20} bytes live longer and the peak grows by {128 << 20}" in dear.detail


@pytest.mark.parametrize("overlap", ["auto", "force"])
def test_memory_limit(overlap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bulk is refused if the extra peak memory exceeds the limit, unless it is requested.

    The matmul would wait for the gather's input. Its operand could otherwise be freed before `big` is allocated.
    """
    d = _held(2048)
    options, requested = (
        parse({"profile": "h200", "min_bytes": 0, "split": "off", "overlap": overlap, **more}, frozenset())[0]
        for more in ({}, {"overrides": {"*": "bulk"}})
    )
    (free,) = decide(d.graph, options, "backward", lambda *_: None).plan.decisions
    assert str(free.strategy) == "bulk", free
    monkeypatch.setattr(peak_memory, "MORE_BYTES", 0)
    monkeypatch.setattr(peak_memory, "MORE_SHARE", 0.0)
    (held,) = decide(d.graph, options, "backward", lambda *_: None).plan.decisions
    assert held.reason is R.MEMORY and "32 MiB" in held.detail, held
    if overlap == "auto":
        assert held.pairing and held.pairing.peak_bytes == held.pairing.holds_bytes == 32 << 20, held
    (bulk,) = decide(d.graph, requested, "backward", lambda *_: None).plan.decisions
    assert str(bulk.strategy) == "bulk", bulk


def test_every_reason_is_provoked() -> None:
    forms = {r for pair in FORM_REASONS.values() for r in pair if r is not None}
    elsewhere = {R.SCALES, R.SCALED_FORM, R.FILTERED, R.SIZES_NOT_16, R.RECIPE}  # tests/fp8/test_insert.py
    elsewhere |= {R.REDUCE_DTYPE}  # test_reduce_dtype.py
    here = {R.GROUP_NOT_STATIC, R.MUTATION_BARRIER, R.MEMORY}
    assert forms | set(SITUATIONS.values()) | elsewhere | here == set(Reason)


def test_every_refused_form_is_here() -> None:
    """Every form that must be refused in forward has an entry in FORM_REASONS."""
    assert {name for name, form in FORMS.items() if form.expected.refused} <= set(FORM_REASONS)


def test_a_sum_without_an_end() -> None:
    """The search for a miss's reason is bounded and not recursive, because residual streams are sums of sums."""
    from torch.fx import Graph

    from ub_overlap import _torch_compat as compat
    from ub_overlap.compiler.match import explain_reduction

    graph = Graph()
    node = before = graph.placeholder("x")
    with compat.FakeTensorMode():
        value = torch.empty(4, 4)
    node.meta["val"] = value
    for _ in range(2000):  # each is the sum of the previous two
        before, node = node, graph.call_function(torch.ops.aten.add.Tensor, (node, before))
        node.meta["val"] = value
    assert explain_reduction.find_scaling(node) is None


def traced_messages(rank: int, world: int) -> list[str]:
    """Decisions about a traced send and receive, or what is wrong with their result."""

    def exchange(x: Tensor) -> Tensor:
        received = torch.empty_like(x)
        send, receive = dist.isend(2 * x, 1 - rank), dist.irecv(received, 1 - rank)
        send.wait(), receive.wait()  # type: ignore[union-attr]
        return received + 1

    with torch._dynamo.config.patch(enable_p2p_compilation=True):
        decisions = decisions_of(exchange, (torch.full((4,), float(rank)),))
    return [f"{d.reason and d.reason.value}: {d.detail}" for d in decisions]


@since((2, 13), "does not trace sends and receives")
def test_traced_messages_are_left_alone(pool2: RankPool) -> None:
    for found in pool2.run(traced_messages):
        assert len(found) == 2, found
        assert all(one.startswith("collective_unsupported: _c10d_functional.i") for one in found), found
