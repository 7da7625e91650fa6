"""The option reduce_dtype: the type in which gradients are sent. Sums are taken in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Graph, Node

from tests.compiler.dags import Dag, c10d
from tests.harness.ranks import RankPool
from tests.models.compare import compare
from ub_overlap.compiler.options import Options, parse
from ub_overlap.compiler.plan.decision import Decision
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.plan.reasons import Reason
from ub_overlap.compiler.reports.summary import format_plan
from ub_overlap.compiler.select.decide import decide
from ub_overlap.runtime.errors import OptionError

BF16, F32 = torch.bfloat16, torch.float32
STRATEGIES = ["pipelined", "bulk", "split"]
cast = torch.ops.prims.convert_element_type.default


@pytest.mark.parametrize("value", [torch.bfloat16, "bfloat16"])
def test_a_type_or_its_name(value: Any) -> None:
    assert parse({"reduce_dtype": value}, frozenset())[0] == Options(reduce_dtype="bfloat16")
    assert Options(reduce_dtype="bfloat16").key() != Options().key()


@pytest.mark.parametrize("value", ["int8", torch.float64, torch.float8_e4m3fn, 16])
def test_other_types_are_refused(value: Any) -> None:
    with pytest.raises(OptionError, match="reduce_dtype"):
        parse({"reduce_dtype": value}, frozenset())


# --- decisions ----------------------------------------------------------------------------------------------------------


def gradient(product: torch.dtype, reader: str = "output") -> Graph:
    """Return the gradient of a weight, cast to fp32 and scattered, and an independent matmul. `reader`: of the result."""
    d = Dag(2, dtype=product)
    a, b, c = (d.input(name, 64, 64) for name in "abc")
    grad: Node = d.mm(d.t(a), b)
    total = d.scatter(grad if product is F32 else d.call(cast, grad, F32))
    if reader == "matmul":
        total = d.mm(total, d.call(cast, c, F32))
    elif reader == "reduction":  # hybrid sharding
        total = d.scatter(total)
    return d.output(total, d.mm(b, c))


def decided(graph: Graph, strategy: str, phase: str = "backward", **options: Any) -> Decision:
    overrides = [{"strategy": strategy, "optional": True}]
    parsed = parse({"overlap": "force", "overrides": overrides, **options}, frozenset())[0]
    plan = decide(graph, parsed, phase, lambda *_: None).plan
    assert Plan.from_json(plan.to_json()) == plan
    return plan.decisions[0]


def sent(d: Decision) -> tuple[str, int | None, bool]:
    """Return the type that is sent, the bytes less than traced, and whether the input is rounded."""
    assert d.work is not None
    assert d.sent_dtype == ("" if d.work.dtype == d.dtype else d.work.dtype)
    return d.work.dtype, d.saved_bytes, d.rounds


ELEMENTS = 32 * 64  # that a rank sends


def test_one_kernel_sends_the_traced_type() -> None:
    """So it is no form of a gradient that is to be sent in a narrower one."""
    traced, rounded = (decided(gradient(F32), "one_shot", reduce_dtype=t) for t in (None, BF16))
    assert str(traced.strategy) == "one_shot" and sent(traced) == ("float32", 0, False)
    assert str(rounded.strategy) != "one_shot" and "reduce_dtype asks for torch.bfloat16" in rounded.detail


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_sent(strategy: str) -> None:
    """By default the type in front of the widening cast; as traced; and narrower than traced, where that is possible."""
    assert sent(decided(gradient(BF16), strategy)) == ("bfloat16", 2 * ELEMENTS, False)
    as_traced, rounded = (decided(gradient(BF16), strategy, reduce_dtype=t) for t in (F32, torch.float16))
    narrow, lossy = decided(gradient(BF16), strategy, reduce_dtype=BF16), decided(gradient(F32), strategy, reduce_dtype=BF16)
    assert sent(narrow) == ("bfloat16", 2 * ELEMENTS, False) and narrow.bytes == 2 * ELEMENTS
    if strategy == "pipelined":  # the matmul's op sends the matmul's type
        for d in (as_traced, rounded, lossy):
            assert d.reason is Reason.REDUCE_DTYPE and not d.overlapped and d.saved_bytes == 0, d
        assert "sends torch.bfloat16, and reduce_dtype asks for torch.float32" in as_traced.detail
        return
    assert sent(as_traced) == ("float32", 0, False) and as_traced.bytes == 4 * ELEMENTS
    assert sent(rounded) == ("float16", 2 * ELEMENTS, True)
    assert sent(lossy) == ("bfloat16", 2 * ELEMENTS, True)
    assert f"rounds to bfloat16, sends that and sums in float32 ({2 * ELEMENTS} bytes fewer)" in lossy.detail
    assert all(str(d.strategy) == strategy for d in (narrow, as_traced, lossy))
    if strategy == "bulk":
        assert "not pipelined: reduce_dtype: " in lossy.detail


def test_types_that_are_as_wide_change_nothing() -> None:
    """Wider summands of bf16 products are the same numbers, and sums are taken in fp32 anyway."""
    d = Dag(2)
    plain = d.output(d.scatter(d.mm(d.input("a", 64, 64), d.input("b", 64, 64))))
    for wanted in (F32, BF16, torch.float16):
        assert sent(decided(plain, "pipelined", reduce_dtype=wanted)) == ("bfloat16", 0, False)


def test_only_returned_gradients() -> None:
    """Look-alikes: a forward, a sum that a matmul reads. A sum that is summed once more, as in HSDP, is a gradient."""
    assert sent(decided(gradient(F32), "split", "forward", reduce_dtype=BF16)) == ("float32", 0, False)
    assert sent(decided(gradient(F32, "matmul"), "split", reduce_dtype=BF16)) == ("float32", 0, False)
    assert sent(decided(gradient(F32, "reduction"), "split", reduce_dtype=BF16)) == ("bfloat16", 2 * ELEMENTS, True)


def test_a_maximum_is_not_rounded() -> None:
    d = Dag(2, dtype=F32)
    made = d.call(c10d.reduce_scatter_tensor.default, d.input("x", 64, 64), "max", 2, "g")
    graph = d.output(d.call(c10d.wait_tensor.default, made))
    plans = [decide(graph, Options(reduce_dtype=name), "backward", lambda *_: None).plan for name in (None, "bfloat16")]
    assert plans[0] == plans[1] and plans[0].decisions[0].reason is Reason.REDUCE_OP_UNSUPPORTED


def test_ranks_compare_it() -> None:
    """Rounded bytes are part of the plan that ranks compare, and of its summary."""
    plans = [
        decide(gradient(F32), Options(reduce_dtype=name, overlap="force"), "backward", lambda *_: None).plan
        for name in (None, "bfloat16")
    ]
    assert plans[0].shared_digest != plans[1].shared_digest
    mixed = [
        decide(
            gradient(BF16), Options(reduce_dtype=name, overlap="force", overrides={"*": "bulk"}), "backward", lambda *_: None
        )
        for name in (None, "float32")
    ]
    assert mixed[0].plan.shared_digest != mixed[1].plan.shared_digest
    assert f"each rank sends {2 * ELEMENTS} bytes less than traced" in format_plan(plans[1])
    assert "less than traced" not in format_plan(plans[0])


# --- results ------------------------------------------------------------------------------------------------------------


def results(
    rank: int, world: int, mixed: bool, wanted: str | None, strategy: str, inner: str = "aot_eager"
) -> tuple[dict[str, tuple[float, float]], list[tuple[str, int, int]]]:
    """Return errors of outputs and gradients against fp64, and (type, bytes, bytes a call copied) of the gradients' sites."""
    options = {
        "overlap": "force", "reduce_dtype": wanted, "overrides": [{"strategy": strategy, "phase": "backward"}],
        "inner": inner,
    }  # fmt: skip
    outcome = compare(rank, world, "tests.models.fsdp", {"mixed": mixed}, options)
    backward = [d for d in outcome.decisions if d["phase"] == "backward"]
    assert all(d["strategy"] == strategy for d in backward), [(d["strategy"], d["reason"], d["detail"]) for d in backward]
    return outcome.errors, [(d["work"]["dtype"], d["bytes"], d["bytes_copied"] // d["calls"]) for d in backward]


@pytest.mark.parametrize(("strategy", "wanted"), [("split", None), ("split", "float32"), ("bulk", "float32")])
def test_mixed_precision_gradients_are_as_exact(pool2: RankPool, strategy: str, wanted: str | None) -> None:
    """bf16 products: narrow or as traced, errors are those of eager, which reduces in fp32."""
    name, size = ("float32", 4) if wanted else ("bfloat16", 2)
    for errors, sites in pool2.run(results, True, wanted, strategy):
        assert all(ours <= 1.05 * eager + 1e-6 for eager, ours in errors.values()), errors
        elements = 96 * 64 // 2
        assert sites == [(name, elements * size, elements * size)] * 2


@pytest.mark.parametrize(("strategy", "inner"), [("bulk", "aot_eager"), ("split", "inductor")])
def test_rounded_gradients(pool2: RankPool, strategy: str, inner: str) -> None:
    """fp32 products sent in bf16: gradients are off by the rounding of one summand each, everything else not at all."""
    for errors, sites in pool2.run(results, False, "bfloat16", strategy, inner):
        elements = 96 * 64 // 2
        assert sites == [("bfloat16", 2 * elements, 2 * elements)] * 2
        for name, (eager, ours) in errors.items():
            if "weight" not in name:
                assert ours <= 4 * eager + 1e-6, (name, eager, ours)
            else:  # summands of ranks are at most as large as a few times the sum's amax
                assert 1e-5 < ours < 4 * 2**-8, (name, eager, ours)
