"""Casts in a form that Inductor fuses with what computes their inputs, read from the graph after the pass; sampled scales."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from tests.fp8.rank_fp8 import float8, mlp_sizes
from tests.fp8.test_delayed import step
from tests.fp8.test_numerics import M, N, compiled, inputs, linear
from tests.harness.ranks import RankPool
from tests.models.compare import uncached
from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.fp8.insert.insert_casts import insert_casts
from ub_overlap.compiler.fp8.insert.insert_config import InsertConfig
from ub_overlap.compiler.fp8.producing_kernel import maps_elements
from ub_overlap.compiler.fp8.recipe import RecipeName, recipe_of
from ub_overlap.compiler.fp8.state.delayed_scaling import SAMPLED_ROWS, sample_steps
from ub_overlap.runtime import ops as ops  # registers them
from ub_overlap.runtime.fp8.amax_history import LENGTH
from ub_overlap.runtime.fp8.numerics import FLOAT8

aten = torch.ops.aten
LAYOUT_COPY = torch.ops.ub_overlap.fp8_layout_copy.default
RECORD = torch.ops.ub_overlap.fp8_record_amax.default
ROWS, INNER, COLS = 8192, 64, 48


def rewritten(recipe: RecipeName, with_norm: bool = False) -> tuple[Graph, dict[str, Node]]:
    """Return the joint graph of y = relu(x) @ w^T after the pass, and its values "relu" and "dy".

    `with_norm`: relu(x / mean(x) of the row) instead."""
    graph = Graph()
    with FakeTensorMode():
        empty = torch.empty(0, dtype=torch.bfloat16)

    def add(node: Node, *shape: int) -> Node:
        node.meta["val"] = empty.new_empty(shape)
        return node

    x, w, dy = (
        add(graph.placeholder(n), *s) for n, s in (("x", (ROWS, INNER)), ("w", (COLS, INNER)), ("tangents_1", (ROWS, COLS)))
    )
    if with_norm:
        mean = add(graph.call_function(aten.mean.dim, (x, [-1], True)), ROWS, 1)
        x = add(graph.call_function(aten.div.Tensor, (x, mean)), ROWS, INNER)
    relu = add(graph.call_function(aten.relu.default, (x,)), ROWS, INNER)
    transposed = add(graph.call_function(aten.permute.default, (w, [1, 0])), INNER, COLS)
    y = add(graph.call_function(aten.mm.default, (relu, transposed)), ROWS, COLS)
    dx = add(graph.call_function(aten.mm.default, (dy, w)), ROWS, INNER)
    dyt = add(graph.call_function(aten.permute.default, (dy, [1, 0])), COLS, ROWS)
    dw = add(graph.call_function(aten.mm.default, (dyt, relu)), COLS, INNER)
    graph.output((y, dx, dw))
    assert insert_casts(graph, InsertConfig(recipe_of(recipe), backward=True, state="fused")) == 3
    return graph, {"relu": relu, "dy": dy}


def ancestors(node: Node) -> set[Node]:
    found: set[Node] = set()
    todo = [node]
    while todo:
        for source in todo.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                todo.append(source)
    return found


def casts_of(graph: Graph, value: Node) -> list[Node]:
    """Return the casts to float8 of elements of `value`, which has rows of its own."""
    casts = [n for n in graph.nodes if n.op == "call_function" and n.meta["val"] is not None and _is_cast(n)]
    return [n for n in casts if value in ancestors(n) and n.meta["val"].shape == value.meta["val"].shape]


def _is_cast(node: Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, Tensor) and value.dtype in FLOAT8 and "convert_element_type" in str(node.target)


def reduced_rows(node: Node) -> list[int]:
    """Return the numbers of rows that are reduced for `node`."""
    amaxes = [n for n in ancestors(node) if n.target is aten.amax.default]
    return [n.all_input_nodes[0].meta["val"].shape[0] for n in amaxes if n.all_input_nodes[0].meta["val"].dim() == 2]


def test_delayed_casts_wait_for_a_sample_only() -> None:
    """A cast depends on reductions of sampled rows. Nothing reduces the whole tensor: the cast itself is measured."""
    graph, values = rewritten("delayed")
    for name, value in values.items():
        casts = casts_of(graph, value)
        assert len(casts) == 1, name
        (rows,) = reduced_rows(casts[0])
        assert SAMPLED_ROWS <= rows < 2 * SAMPLED_ROWS
        reductions = graph.find_nodes(op="call_function", target=aten.amax.default)
        assert [n.all_input_nodes[0].meta["val"].shape[0] for n in reductions if value in ancestors(n)].count(ROWS) == 0
        (record,) = (n for n in graph.find_nodes(op="call_function", target=RECORD) if n.args[1] is casts[0])
        assert any(user.target is aten._scaled_mm.default for user in record.users), name
    records = graph.find_nodes(op="call_function", target=RECORD)
    assert [r.args[6] for r in records] == ["forward", "backward"]


def test_current_casts_measure_by_rows_first() -> None:
    """The amax of a tensor is that of its rows' amaxes, which fuse with a norm."""
    graph, values = rewritten("tensorwise")
    for value in values.values():
        (cast,) = casts_of(graph, value)
        assert reduced_rows(cast) == [ROWS]
        partial = [n for n in ancestors(cast) if n.target is aten.amax.default and n.args[1] == [-1]]
        assert [tuple(n.meta["val"].shape) for n in partial if value in ancestors(n)] == [(ROWS,)]


def test_no_op_of_ours_reads_an_activation() -> None:
    """Inductor never fuses an op of ours: one that read an activation would force a 16-bit copy of it into memory."""
    graph, _ = rewritten("delayed")
    own = [n for n in graph.nodes if str(n.target).startswith("ub_overlap.")]
    assert len(own) == 3
    for node in own:
        for source in node.all_input_nodes:
            value = source.meta["val"]
            assert source.op == "placeholder" or value.dim() < 2 or value.dtype in FLOAT8, node


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_transposed_copies(recipe: RecipeName) -> None:
    """A kernel that only casts stores the transposed copies too, of the gradient, the activation and the weight."""
    graph, _ = rewritten(recipe)
    copies = graph.find_nodes(op="call_function", target=aten.clone.default)
    assert sorted(tuple(n.meta["val"].shape) for n in copies) == [(COLS, ROWS), (INNER, COLS), (INNER, ROWS)]
    assert not graph.find_nodes(op="call_function", target=LAYOUT_COPY)
    (of_activation,) = (n for n in copies if n.meta["val"].shape == (INNER, ROWS))
    # A delayed cast is saved. Saved transposed, backward need not copy it.
    assert (of_activation.meta["recompute"] is compat.CheckpointPolicy.MUST_SAVE) == (recipe == "delayed")


def test_transposed_copies_of_reduced_rows() -> None:
    """A kernel that reduces rows must not store a transpose: its stores would not be coalesced."""
    graph, _ = rewritten("delayed", with_norm=True)
    (copy,) = graph.find_nodes(op="call_function", target=LAYOUT_COPY)
    assert tuple(copy.meta["val"].shape) == (INNER, ROWS)
    copies = graph.find_nodes(op="call_function", target=aten.clone.default)
    assert sorted(tuple(n.meta["val"].shape) for n in copies) == [(COLS, ROWS), (INNER, COLS)]


def test_values_of_dynamic_shape_map_elements_too() -> None:
    """Sizes are no tensors: only a reduction of rows keeps a copy out of the kernel."""

    def mapped(x: Tensor) -> Tensor:
        return x.relu().view(x.shape[0] * x.shape[1], x.shape[2])

    def reduced(x: Tensor) -> Tensor:
        return mapped(x / x.mean(-1, keepdim=True))

    for function, expected in ((mapped, True), (reduced, False)):
        graph = make_fx(function, tracing_mode="symbolic")(torch.randn(3, 4, 8)).graph
        (result,) = graph.output_node().all_input_nodes
        assert maps_elements(result) == expected


@pytest.mark.parametrize(
    "rows", [(1,), (639,), (640,), (8192,), (16, 512), (512, 16), (1000, 10), (8, 4, 512), (1, 8192), (7, 11, 13, 17)], ids=str
)
def test_samples_count_rows_over_all_dims(rows: tuple[int, ...]) -> None:
    """SAMPLED_ROWS or more, and not many more."""
    steps = sample_steps(rows)
    sampled = math.prod(len(range(0, n, steps.get(dim, 1))) for dim, n in enumerate(rows))
    assert min(SAMPLED_ROWS, math.prod(rows)) <= sampled < 2 * SAMPLED_ROWS
    assert (sampled == math.prod(rows)) == (not steps)


def test_layout_copy() -> None:
    q = torch.randn(6, 4).to(FLOAT8[0])
    torch.library.opcheck(LAYOUT_COPY, (q.view(torch.uint8).t(),), test_utils=("test_schema", "test_faketensor"))
    copy = LAYOUT_COPY(q.t())
    assert copy.is_contiguous() and torch.equal(copy.float(), q.float().t())


@pytest.mark.tier("test")
def test_activations_are_saved_in_float8() -> None:
    """Backward of the second linear reads the first one's activation in float8, and relu's own input."""
    module = nn.Sequential(nn.Linear(INNER, COLS, bias=False), nn.ReLU(), nn.Linear(COLS, INNER, bias=False)).bfloat16()
    x = torch.randn(1024, INNER).bfloat16().requires_grad_()
    saved: list[tuple[tuple[int, ...], torch.dtype]] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    with uncached():
        run = compiled(module, fp8={"recipe": "delayed", "state": "saved in float8"})
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = run(x)
    y.float().square().sum().backward()
    large = sorted(str(dtype) for shape, dtype in saved if shape[:1] == (1024,))
    assert large == ["torch.bfloat16", "torch.float8_e4m3fn", "torch.float8_e4m3fn"], saved


def test_backward_saves_no_view_of_the_amax() -> None:
    """Casts of gradients read the vector of amax values. Inductor may compute a scale in the memory of a saved element of it,
    and cuBLASLt refuses that address."""
    module = nn.Sequential(nn.Linear(INNER, COLS, bias=False), nn.ReLU(), nn.Linear(COLS, INNER, bias=False)).bfloat16()
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with uncached():
        run = compiled(module, fp8={"recipe": "delayed", "state": "saved amax"})
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = run(torch.randn(1024, INNER).bfloat16().requires_grad_())
    y.float().square().sum().backward()
    numbers = [t for t in saved if t.dtype == torch.float32 and t.dim() == 0]
    assert numbers and all(t.untyped_storage().nbytes() == t.itemsize for t in numbers)
    assert any(t.dtype == torch.float32 and t.dim() == 1 for t in saved), "the amax of all tensors"


def test_first_call_of_many_rows(pool2: RankPool) -> None:
    """Scales of sampled rows cost no accuracy: the largest errors are those of tensorwise, but for the place of the scale
    in its binade."""
    sizes = {**mlp_sizes(2), "length": 2 * 2 * SAMPLED_ROWS}
    errors_of = {}
    for recipe in ("tensorwise", "delayed"):
        options = {"fp8": {"recipe": recipe, "state": "many rows"}, "inner": "aot_eager", "overlap": "force"}
        runs = pool2.run(float8, "tests.models.dtensor_mlp", sizes, options)
        assert all({c.recipe for c in run.casts} == {recipe} for run in runs)
        errors_of[recipe] = [run.errors for run in runs]
    for current, delayed_errors in zip(*errors_of.values(), strict=True):
        for name, (_, error_of) in delayed_errors.items():
            assert error_of <= 1.5 * current[name][1], (name, error_of, current[name])


@pytest.mark.tier("test")
@pytest.mark.parametrize("rows", [(2 * SAMPLED_ROWS,), (2, SAMPLED_ROWS), (20, SAMPLED_ROWS // 10)], ids=str)
def test_rows_that_are_not_sampled(rows: tuple[int, ...]) -> None:
    """A larger row between the sampled ones saturates in the first calls only, and other rows keep their accuracy.

    The amax comes from the cast, so it grows by HEADROOM in each call until nothing saturates."""
    module, x = linear(bias=False), torch.cat([inputs("normal")] * (2 * SAMPLED_ROWS // M))
    x[1] *= 8
    dy = torch.ones(*rows, N).bfloat16()
    plain = x.detach().float() @ module.weight.detach().float().t()
    with uncached():
        run = compiled(module, fp8={"recipe": "delayed", "state": f"rows between {rows}"})
        results = [step(run, module, x.view(*rows, -1), dy)[0].float().flatten(0, -2) for _ in range(4)]

    def error_of(y: Tensor, rows: slice) -> float:
        return float((y[rows] - plain[rows]).norm() / plain[rows].norm())

    between = [error_of(y, slice(1, 2)) for y in results]
    assert between[0] > 0.3 and between == sorted(between, reverse=True) and between[-1] < 0.06
    assert all(error_of(y, slice(2, None)) < 0.06 for y in results)


def test_a_tensor_that_underflows_is_recorded() -> None:
    """A tensor that shrinks until its casts are 0 still has an amax, that of the sample, and its scale follows."""
    module, x = linear(bias=False), torch.cat([inputs("normal")] * (2 * SAMPLED_ROWS // M))
    dy = torch.ones(len(x), N).bfloat16()
    with uncached():
        run = compiled(module, fp8={"recipe": "delayed", "state": "underflow"})
        step(run, module, x, dy)
        small = x.detach() * 2.0**-30
        results = [step(run, module, small, dy)[0].float() for _ in range(LENGTH + 2)]
    plain = small.float() @ module.weight.detach().float().t()
    assert not results[0].any()
    assert (results[-1] - plain).norm() < 0.06 * plain.norm()


@pytest.mark.tier("test")
@pytest.mark.parametrize("size", [2.0**-20, 0.5])
def test_gradients_of_few_rows(size: float) -> None:
    """Where no row of the sample has a gradient, the scale is found from the cast."""
    module, x = linear(bias=False), torch.cat([inputs("normal")] * (2 * SAMPLED_ROWS // M))
    dy = torch.zeros(len(x), N).bfloat16()
    dy[1] = size
    with uncached():
        run = compiled(module, fp8={"recipe": "delayed", "state": f"few rows {size}"})
        results = [step(run, module, x, dy)[1].float() for _ in range(6)]
    plain = dy.float() @ module.weight.detach().float()
    assert (results[-1] - plain).norm() < 0.1 * plain.norm()
