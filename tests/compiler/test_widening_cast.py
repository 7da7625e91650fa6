"""Widening casts in front of a reduction: bulk sends what they read, and sums it in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.fx import Graph, Node

from tests.compiler.dags import Dag
from tests.compiler.rank_compile import world_name
from tests.harness.ranks import RankPool
from tests.harness.tiers import in_full
from tests.models.compare import compare, uncached
from ub_overlap.compiler.cost import load
from ub_overlap.compiler.cost.predict import predict
from ub_overlap.compiler.cost.site_shape import SiteShape
from ub_overlap.compiler.match import find_candidates
from ub_overlap.compiler.options import Options
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.plan.strategy import NONE, Mode, Strategy
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.compiler.select.decide import decide

BF16, F32 = torch.bfloat16, torch.float32
ROWS, COLS = 12, 10
"""Of the tensor before its cast. ROWS / 2 and COLS / 2 are shards of two ranks."""
Form = Callable[[Tensor], Tensor]


def split_columns(y: Tensor) -> Tensor:
    return torch.cat(torch.ops.aten.split(y.float(), COLS // 2, 1), 0)


def uneven(y: Tensor) -> Tensor:
    """33 rows of two ranks: the last shard is padded."""
    first, last = torch.ops.aten.split(y.float()[: ROWS - 1], ROWS // 2)
    return torch.cat([first, torch.constant_pad_nd(last, [0, 0, 0, 1])])


FOLLOWED: dict[str, Form] = {
    "cast": lambda y: y.float(),
    "fp16": lambda y: y.half().float(),
    "view": lambda y: y.view(2, ROWS // 2, COLS).float().view(-1),
    "transpose": lambda y: y.float().t().contiguous(),
    "permute": lambda y: y.float().view(2, 6, 2, 5).permute(2, 0, 3, 1).contiguous(),
    "scaled": lambda y: (y.float() / 3).view(-1) * 2,
    "columns": split_columns,
    "uneven": uneven,
    "bucket": lambda y: torch.cat([y.float().view(2, -1), (y * 2).float().view(2, -1)], 1).view(-1),
}
NOT_FOLLOWED: dict[str, Form] = {
    "arithmetic": lambda y: y.float().exp(),
    "scaled by a tensor": lambda y: y.float() * y.float().sum(),
    "part scaled": lambda y: torch.cat([y.float() / 3, y.float().clone()]),
    "added to": lambda y: y.float() + 1e-3,
    "integers": lambda y: (y * 100).to(torch.int16).float(),
    "two types": lambda y: torch.cat([y.float(), y.half().float()]),
    "part is wide": lambda y: torch.cat([y.float(), y.float().sin()]),
    "padded with another value": lambda y: torch.constant_pad_nd(y.float(), [0, 0, 0, 2], 0.1),
    "narrowing": lambda y: (y.float() / 3).bfloat16(),
}
FORMS = FOLLOWED | NOT_FOLLOWED


def reduced(name: str, collective: str, reduce_op: str) -> Callable[..., tuple[Tensor, ...]]:
    """Return a function of (x, a, b): the reduction of a form of sin(x), and an independent matmul."""

    def function(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        wide = FORMS[name](torch.sin(x))
        if collective == "all_reduce":
            return funcol.all_reduce(wide, reduce_op, world_name()), a @ b
        return funcol.reduce_scatter_tensor(wide, reduce_op, 0, world_name()), a @ b

    return function


def kept(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """The cast's result is returned too."""
    wide = torch.sin(x).float()
    return funcol.reduce_scatter_tensor(wide, "sum", 0, world_name()), a @ b, wide


def of_rank(rank: int) -> Tensor:
    return torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(rank)).to(BF16)


def run(rank: int, function: Any, inner: str, verify: bool = False, strategy: str = "bulk") -> tuple[tuple[Tensor, ...], Any]:
    """Return the results of `function`, and the decision of its collective."""
    a, b = torch.randn(8, 6).to(BF16), torch.randn(6, 4).to(BF16)
    options = {"overlap": "force", "inner": inner, "overrides": {"*": strategy}, "verify": verify}
    torch._dynamo.reset()  # the forms share one code object, and its recompilations are limited
    mark = HISTORY.mark()
    with uncached(), torch.no_grad():
        outs = torch.compile(function, backend="ub_overlap", options=options)(of_rank(rank), a, b)
    ((decision,),) = [plan.decisions for plan in HISTORY.since(mark)]
    torch.testing.assert_close(outs[1], a @ b)
    return outs, decision


def forms(rank: int, world: int, collective: str, reduce_op: str, inner: str, names: list[str]) -> list[str]:
    """Return what is wrong: with numbers against fp64, the type that is sent, or the bytes."""
    bad: list[str] = []
    for name in names:
        (out, *_), decision = run(rank, reduced(name, collective, reduce_op), inner)
        summands = [FORMS[name](torch.sin(of_rank(r))) for r in range(world)]
        total = torch.stack([s.double() for s in summands]).sum(0) / (world if reduce_op == "avg" else 1)
        size = torch.stack([s.double().abs() for s in summands]).sum(0).max()
        want = total if collective == "all_reduce" else total.chunk(world)[rank]
        wide = summands[0].dtype
        allowed = (world + 3) * torch.finfo(wide).eps * size
        if out.dtype != wide or out.shape != want.shape or (out.double() - want).abs().max() > allowed:
            bad.append(f"{name}: {out.dtype} {(out.double() - want).abs().max()} > {allowed}")
        sent = {"fp16": "float16"}.get(name, "bfloat16") if name in FOLLOWED else str(wide).removeprefix("torch.")
        elements = summands[0].numel() // world * (world - 1)
        sizes = {"float32": 4, "bfloat16": 2, "float16": 2}
        bytes_sent = elements * (sizes[sent] + (wide.itemsize if collective == "all_reduce" else 0))
        found = (str(decision.strategy), decision.work.dtype, decision.work.out_dtype, decision.bytes)
        if found != ("bulk", sent, "float32" if name in FOLLOWED else "", bytes_sent):
            bad.append(f"{name}: {found}, {bytes_sent} bytes expected; {decision.detail}")
        if (f"sends {sent} and sums in float32" in decision.detail) != (name in FOLLOWED):
            bad.append(f"{name}: {decision.detail}")
    return bad


def scaled_and_split(rank: int, world: int) -> list[float]:
    """Return the errors of a reduction of scaled values that is split, against fp64."""
    errors = []
    for collective in ("reduce_scatter", "all_reduce"):
        (out, *_), decision = run(rank, reduced("scaled", collective, "sum"), "aot_eager", strategy="split")
        assert str(decision.strategy) == "split"
        total = torch.stack([FORMS["scaled"](torch.sin(of_rank(r))).double() for r in range(world)]).sum(0)
        want = total if collective == "all_reduce" else total.chunk(world)[rank]
        errors.append(float((out.double() - want).abs().max()))
    return errors


def test_scalings_of_split_reductions(pool2: RankPool) -> None:
    for errors in pool2.run(scaled_and_split):
        assert max(errors) < 1e-5, errors


@pytest.mark.parametrize(("collective", "reduce_op"), [("reduce_scatter", "sum"), in_full(("all_reduce", "avg"))])
def test_forms(pool2: RankPool, collective: str, reduce_op: str) -> None:
    for bad in pool2.run(forms, collective, reduce_op, "aot_eager", list(FORMS)):
        assert not bad, "\n".join(bad)


@pytest.mark.tier("full")
def test_forms_under_inductor(pool2: RankPool) -> None:
    for bad in pool2.run(forms, "reduce_scatter", "avg", "inductor", ["scaled", "columns"]):
        assert not bad, "\n".join(bad)


def other_reader(rank: int, world: int) -> list[str]:
    (out, _, wide), decision = run(rank, kept, "aot_eager")
    summands = [torch.sin(of_rank(r)).float() for r in range(world)]
    torch.testing.assert_close(out, sum(summands).chunk(world)[rank])  # type: ignore[attr-defined]
    torch.testing.assert_close(wide, summands[rank], rtol=0, atol=0)
    return [str(decision.strategy), decision.work.dtype, decision.work.out_dtype]


def test_cast_with_another_reader(pool2: RankPool) -> None:
    """The wide tensor exists anyway, and is sent."""
    assert pool2.run(other_reader) == [["bulk", "float32", ""]] * 2


def verified(rank: int, world: int) -> str:
    (out, *_), decision = run(rank, reduced("scaled", "reduce_scatter", "sum"), "aot_eager", verify=True)
    return f"{decision.strategy} {out.dtype}"


def test_verify_keeps_the_plain_graph(pool2: RankPool) -> None:
    assert pool2.run(verified) == ["bulk torch.float32"] * 2


def test_mixed_precision_gradients(pool2: RankPool) -> None:
    """SimpleFSDP's mixed precision: bf16 products, fp32 reductions. The gradient of `up` has no other matmul to hide behind."""
    options = {"overlap": "force", "inner": "aot_eager", "overrides": {"backward.*": "bulk"}}
    for outcome in pool2.run(compare, "tests.models.fsdp", {"mixed": True}, options):
        outcome.check()
        bulk = [d for d in outcome.decisions if d["strategy"] == "bulk"]
        assert bulk, outcome.decisions
        for d in bulk:
            assert (d["work"]["dtype"], d["work"]["out_dtype"]) == ("bfloat16", "float32")
            assert d["bytes"] == 64 * 96 * 2 // 2 and "sends bfloat16 and sums in float32" in d["detail"]


def gradients(widen: bool, ranks: int = 8, reduce: bool = False) -> Graph:
    """Return a reduction of a norm's large gradient, widened or not, and matmuls that are independent of it."""
    d = Dag(ranks)
    grad: Node = d.input("grad", 65536, 1024)
    if widen:
        grad = d.call(torch.ops.prims.convert_element_type.default, grad, F32)
    c10d = torch.ops._c10d_functional
    total = d.call(c10d.wait_tensor.default, d.call(c10d.all_reduce.default, grad, "sum", "g")) if reduce else d.scatter(grad)
    return d.output(total, *[d.mm(d.input(f"a{i}", 4096, 8192), d.input(f"b{i}", 8192, 4096)) for i in range(4)])


def test_price() -> None:
    """A site behind a widening cast is priced by the narrow bytes, against a plain collective that sends the wide ones."""
    widened, narrow = [
        decide(gradients(widen), Options(profile="h200", split="off"), "backward", lambda *_: None).plan
        for widen in (True, False)
    ]
    (w,), (n,) = widened.decisions, narrow.decisions
    assert w.strategy.mode is Mode.BULK and w.bytes == n.bytes == 7 * 65536 * 1024 * 2 // 8
    assert w.work is not None and n.work is not None
    assert (w.work.dtype, w.work.out_dtype, n.work.out_dtype) == ("bfloat16", "float32", "")
    times = [dict(d.predicted) for d in (w, n)]
    assert times[0]["none"] > 1.3 * times[1]["none"] and times[0]["bulk"] < 1.1 * times[1]["bulk"]
    assert Plan.from_json(widened.to_json()) == widened


def test_price_of_an_all_reduce() -> None:
    """The summands travel narrow, the sums wide."""
    sizes = ((1024, 1024, 1024, False),)
    narrow, mixed, wide = (
        SiteShape("bulk_all_reduce", 4, dtype, sizes, 32 << 20, 1, operands="bfloat16", out_dtype=out_dtype)
        for dtype, out_dtype in (("bfloat16", ""), ("bfloat16", "float32"), ("float32", ""))
    )
    profile, bulk = load("h200"), Strategy(Mode.BULK)
    sent = [predict(shape, bulk, profile).communication_us for shape in (narrow, mixed, wide)]
    assert sent[1] == pytest.approx((sent[0] + sent[2]) / 2, rel=0.02)
    assert predict(mixed, NONE, profile) == predict(wide, NONE, profile) and mixed.bytes_sent == wide.bytes_sent


def test_maximum_is_not_followed() -> None:
    d = Dag()
    wide = d.call(torch.ops.prims.convert_element_type.default, d.input("x", 8, 4), F32)
    c10d = torch.ops._c10d_functional
    made = d.call(c10d.reduce_scatter_tensor.default, wide, "max", 2, "g")
    (candidate,) = find_candidates(d.output(d.call(c10d.wait_tensor.default, made)))
    assert candidate.collective.widening is None
