"""One linear in float8 on one process, against float64 with the inputs' own rounding.

Legend: x [M, K], w [N, K]; q, s the quantized tensor and its scale; u(t) = 2^-(mantissa bits + 1) a type's unit roundoff.

The bound of a product of quantized operands, element by element. Products of two float8 values are exact in float32 (4 + 4
bits). A float32 sum of K terms errs by at most (K - 1) u(f32) sum|terms| to first order, in any order; scaling twice and adding
a bias round three times more, storing as bf16 once, by u(bf16) of the result. Doubled for the second order.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ub_overlap
from tests.fp8.rank_fp8 import RECIPES, ROWS
from tests.models.compare import uncached
from ub_overlap.compiler.cost.profile_lookup import load
from ub_overlap.compiler.fp8.insert.fp8_profitability import Fp8Profitability
from ub_overlap.compiler.fp8.insert.insert_casts import insert_casts
from ub_overlap.compiler.fp8.insert.insert_config import InsertConfig
from ub_overlap.compiler.fp8.insert.linears import find_linears
from ub_overlap.compiler.fp8.recipe import recipe_of
from ub_overlap.compiler.joint.joint_decision import joint_decision
from ub_overlap.compiler.options import parse
from ub_overlap.compiler.plan.reasons import Reason
from ub_overlap.runtime.fp8 import amax_history

pytestmark = pytest.mark.tier("test")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
U32, U16 = 2.0**-24, 2.0**-9
LEAST_SCALE = 2.0**-120
M, K, N = 32, 64, 48


def quantized(x: Tensor, format: torch.dtype, dim: int | None) -> tuple[Tensor, Tensor]:
    """Quantize as docs/guide/float8.md defines it: (q, s)."""
    largest = torch.finfo(format).max
    amax = (x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)).float()
    s = (amax * (1.0 / largest)).clamp(min=LEAST_SCALE)
    return (x.float() * s.reciprocal()).clamp(-largest, largest).to(format), s


def inputs(kind: str) -> Tensor:
    """x [M, K] in bf16."""
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(M, K, generator=draw)
    if kind == "binades":
        x = x * torch.exp2(torch.randint(-30, 30, (M, K), generator=draw).float())
    elif kind == "outliers":
        x[::7, ::13] *= 1e4
    elif kind == "zeros":
        x[::2] = 0
    elif kind == "signs":
        x[::2] = x[::2].abs()
    elif kind == "all_zero":
        x = x * 0
    elif kind == "tiny":
        x = x * 1e-30
    return x.bfloat16()


def linear(bias: bool) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(K, N, bias=bias).bfloat16()


def compiled(module: nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(module, backend="ub_overlap", options={"inner": "aot_eager", "fp8": "all", **options})


def check(y: Tensor, a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, bias: Tensor | None = None) -> None:
    """y is a [M, K] @ b [K, N] of float8, scaled, within the bound above."""
    scale = sa.double() * sb.double()
    exact = (a.double() @ b.double()) * scale
    terms = (a.double().abs() @ b.double().abs()) * scale
    if bias is not None:
        exact, terms = exact + bias.double(), terms + bias.double().abs()
    bound = 2 * ((a.shape[1] + 3) * U32 * terms + U16 * exact.abs()) + 2.0**-133
    assert ((y.double() - exact).abs() <= bound).all(), ((y.double() - exact).abs() / bound).max()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["normal", "binades", "outliers", "zeros", "signs", "all_zero", "tiny"])
def test_forward_and_gradients(kind: str, recipe: str) -> None:
    module, x = linear(bias=kind == "normal"), inputs(kind).requires_grad_()
    rows = recipe == "rowwise"
    with uncached():
        y = compiled(module, fp8={"recipe": recipe})(x)
        dy = inputs("signs" if kind == "normal" else kind)[:, :N].contiguous() * 0.01
        y.backward(dy)
    w = module.weight.detach()
    xq, xs = quantized(x.detach(), E4M3, -1 if rows else None)
    wq, ws = quantized(w, E4M3, -1 if rows else None)
    check(y.detach(), xq, wq.t(), xs, ws.t() if rows else ws, module.bias)
    dq, ds = quantized(dy, E4M3 if rows else E5M2, -1 if rows else None)
    vq, vs = quantized(w, E4M3, 0 if rows else None)
    assert x.grad is not None and module.weight.grad is not None
    check(x.grad, dq, vq, ds, vs)
    if not rows:
        check(module.weight.grad, dq.t(), xq, ds, xs)
    else:  # bf16 products of the gradient itself and the rows as they were multiplied
        up = (xq.float() * xs).bfloat16()
        check(module.weight.grad, dy.t(), up, torch.ones(()), torch.ones(()))
    if module.bias is not None and module.bias.grad is not None:
        assert torch.allclose(module.bias.grad.double(), dy.double().sum(0), rtol=2 * M * U16)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_quantisation_errs_by_half_a_step(recipe: str) -> None:
    """|x - q s| <= u |x| + s * (half the least subnormal), with what scaling in float32 adds: two roundings."""
    for kind in ("normal", "binades", "outliers", "tiny"):
        x = inputs(kind)
        for format, unit, least in ((E4M3, 2.0**-4, 2.0**-10), (E5M2, 2.0**-3, 2.0**-17)):
            q, s = quantized(x, format, -1 if recipe == "rowwise" else None)
            bound = (unit + 4 * U32) * x.double().abs() + s.double() * least
            assert ((x.double() - q.double() * s.double()).abs() <= bound).all()


def test_it_is_float8_not_a_passthrough() -> None:
    """With a value of 2^20 a tensor's least step is 2^20 / 448 * 2^-9: smaller values are lost, which bf16 keeps."""
    x = torch.full((M, K), 1.0).bfloat16()
    x[0, 0] = 2.0**20
    with uncached():
        y = compiled(linear(bias=False))(x)
        rows = compiled(linear(bias=False), fp8={"recipe": "rowwise"})(x)
    assert (linear(bias=False)(x)[1:] != 0).any(dim=1).all()
    assert (y[1:] == 0).all() and (y[0] != 0).any()
    assert not ROWS or (rows[1:] != 0).any(dim=1).all()  # a scale of its own saves every other row
    assert ROWS or torch.equal(rows, linear(bias=False)(x))  # left alone


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_non_finite_values_propagate(value: float) -> None:
    x = inputs("normal").clone()
    x[3, 5] = value
    with uncached():
        whole = compiled(linear(bias=False))(x)
        rows = compiled(linear(bias=False), fp8={"recipe": "rowwise"})(x)
    assert not whole[3].isfinite().any()
    assert not rows[3].isfinite().any()
    assert rows[:3].isfinite().all() and rows[4:].isfinite().all()


class Named:
    key = "none"

    def __call__(self, module: str, shape: tuple[int, int]) -> bool:
        return False


def test_sizes_that_do_not_divide_and_a_filter() -> None:
    """A linear of 60 inputs, and one that is refused, are bitwise what they are without float8."""
    odd = nn.Linear(60, N).bfloat16()
    x = inputs("normal")[:, :60].contiguous()
    with uncached():
        assert torch.equal(compiled(odd)(x), odd(x))
        whole = linear(bias=True)
        assert torch.equal(compiled(whole, fp8={"filter": Named()})(inputs("normal")), whole(inputs("normal")))
        assert not torch.equal(compiled(whole)(inputs("normal")), whole(inputs("normal")))


@pytest.mark.parametrize(("tokens", "width", "faster"), [(8192, 8192, True), (64, 512, False)])
def test_a_linear_that_would_be_slower(tokens: int, width: int, faster: bool) -> None:
    """By an H200's profile a large linear is faster in float8; the casts of a small one cost more than it saves."""
    graph = torch.fx.Graph()
    with FakeTensorMode():
        values = [torch.empty(tokens, width, dtype=torch.bfloat16), torch.empty(width, width, dtype=torch.bfloat16)]
        x, w = (graph.placeholder(f"arg_{i}") for i in range(2))
        transposed = graph.call_function(torch.ops.aten.permute.default, (w, [1, 0]))
        product = graph.call_function(torch.ops.aten.mm.default, (x, transposed))
        graph.output((product,))
        for node, value in zip((x, w, transposed, product), (*values, values[1].t(), values[0] @ values[1].t()), strict=True):
            node.meta["val"] = value
        count = insert_casts(graph, InsertConfig(recipe_of("tensorwise"), True, None, load("h200")))
    assert count == int(faster)
    casts = [cast for n in graph.nodes if (cast := joint_decision(n).cast) is not None]
    assert [c.reason for c in casts] == [None if faster else Reason.NO_GAIN]
    assert faster or "casts" in casts[0].detail


def test_delayed_casts_cost_less() -> None:
    """Activations and gradients are read once: casts cost less than with current scales."""
    graph = torch.fx.Graph()
    x, w = (graph.placeholder(name) for name in ("x", "w"))
    transposed = graph.call_function(torch.ops.aten.permute.default, (w, [1, 0]))
    product = graph.call_function(torch.ops.aten.mm.default, (x, transposed))
    graph.output((product,))
    rows, inner, cols = 16384, 8192, 16  # few columns: the casts are most of it
    sizes = ((x, (rows, inner)), (w, (cols, inner)), (transposed, (inner, cols)), (product, (rows, cols)))
    for node, size in sizes:
        node.meta["val"] = torch.empty(size, dtype=torch.bfloat16, device="meta")
    linears = find_linears(graph, set())
    reasons = {
        name: Fp8Profitability(linears, recipe_of(name), load("h200"), {}, "bfloat16").explain_slowdown(
            linears[0], [linears[0].forward]
        )
        for name in ("tensorwise", "delayed")
    }
    casts = {name: int(text.rpartition("casts ")[2]) for name, text in reasons.items()}
    assert casts["delayed"] < casts["tensorwise"]


def test_cache_keys() -> None:
    """Every option is part of the key; a filter is by its name, and without one nothing is cached."""
    from ub_overlap.compiler.passes import JointPass

    def key(**options: Any) -> Any:
        return JointPass(parse(options, frozenset())[0]).uuid()

    class Other(Named):
        key = "other"

    variants = [
        {}, {"fp8": "forward"}, {"fp8": "all"}, {"fp8": {"recipe": "rowwise"}},
        {"fp8": {"reduce_scatter": True}}, {"fp8": {"filter": Named()}},
        {"fp8": {"filter": Other()}},
    ]  # fmt: skip
    assert len({str(key(**options)) for options in variants}) == len(variants)
    assert key(fp8={"filter": Named()}) == key(fp8={"filter": Named()})
    assert key(fp8={"filter": lambda module, shape: True}) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fp8", True),
        ("fp8", {"recipe": "columns"}),
        ("fp8", {"filter": "w1"}),
        ("fp8", {"reduce_scatter": 1}),
        ("fp8", {"on": 1}),
    ],
)
def test_bad_options(name: str, value: Any) -> None:
    part = next(iter(value)) if isinstance(value, dict) else name
    with pytest.raises(ValueError, match=f"'{part}'"):
        parse({name: value}, frozenset())


def test_explain_measures_each_product() -> None:
    """The errors of a report are those of the products themselves, and a linear that meets outliers comes first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, K, bias=False), nn.Linear(K, N)).bfloat16()
    spread = torch.ones(K)
    spread[::7] = 3e4
    with torch.no_grad():  # the first layer's outputs lie many binades apart, its inputs do not
        model[0].weight.mul_(spread[:, None])
    x = inputs("normal").requires_grad_()
    with uncached():
        report = ub_overlap.explain(model, {"inner": "aot_eager", "fp8": "all"}, measure=True)(x)
        y = compiled(model[:1])(x)
    errors = {(c.module.rpartition(".")[2], c.role): c.error for c in report.casts}
    assert set(errors) == {(m, r) for m in "01" for r in ("forward", "input gradient", "weight gradient")}
    assert all(e is not None and 1e-3 < e < 0.5 for e in errors.values()), errors
    plain = model[0](x)
    apart = ((y.float() - plain.float()).norm() / plain.float().norm()).item()
    assert errors["0", "forward"] == pytest.approx(apart, rel=1e-3)
    rows = report.float8().splitlines()[2:]
    listed = [float(row.split()[-1]) for row in rows]
    assert listed == sorted(listed, reverse=True) and len(rows) == 6
    assert report.float8() in str(report) and len(report.to_dict()["casts"]) == 6
    plain_report = ub_overlap.explain(model, {"inner": "aot_eager", "fp8": "all"})(x.bfloat16())
    assert {c.recipe for c in plain_report.casts} == {"tensorwise"}


@pytest.mark.tier("full")
def test_explaining_moves_no_history() -> None:
    """A report of its own errors, and a training state that is what it was."""
    model, x = nn.Linear(64, 48).bfloat16(), torch.randn(32, 64).bfloat16().requires_grad_()
    options = {"inner": "aot_eager", "fp8": {"recipe": "delayed", "state": "explained"}}
    with uncached():
        torch.compile(model, backend="ub_overlap", options=options)(x).float().sum().backward()
        before = amax_history.fp8_state("explained").state_dict()
        first = ub_overlap.explain(model, options, measure=True)(x)
        rows = first.float8()
        ub_overlap.explain(model, {**options, "fp8": "all"}, measure=True)(x)
    after = amax_history.fp8_state("explained").state_dict()
    assert before and before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
    assert all(c.error is not None for c in first.casts) and first.float8() == rows
