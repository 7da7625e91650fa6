"""Options: what is allowed, what is said about the rest, and what reaches Inductor."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph

from tests.compiler.rank_compile import FORCE, build
from tests.compiler.test_plan import PLAN
from tests.harness.ranks import RankPool
from tests.harness.traces import as_loss
from tests.models.compare import uncached
from ub_overlap.compiler.options import Options, parse
from ub_overlap.compiler.plan.strategy import Mode, Strategy
from ub_overlap.compiler.unmatched import missed
from ub_overlap.runtime.errors import MissError, OptionError

NAMES = frozenset({"shape_padding", "max_autotune"})


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("overlap", "always", "'auto', 'force', 'off'"),
        ("save", "all", "'gathered', 'shard'"),
        ("on_miss", True, "'ignore', 'warn', 'error'"),
        ("inner", "eager", "'inductor', 'aot_eager'"),
        ("merge_all_reduces", 1, "True, False"),
        ("min_bytes", -1, "an integer of at least 0"),
        ("min_bytes", 1.5, "an integer of at least 0"),
        ("chunks", True, "an integer from 0 to 64"),
        ("chunks", 65, "an integer from 0 to 64"),
        ("mode", "max-autotuned", "'max-autotune'"),
        ("timeout_s", float("inf"), "1e9 at most"),
        ("timeout_s", 0, "seconds above 0"),
        ("timeout_s", "5", "seconds above 0"),
        ("mode", 3, "'max-autotune'"),
        ("memory_budget", -0.5, "a share from 0 to 1, or bytes"),
        ("memory_budget", True, "a share from 0 to 1, or bytes"),
        ("plan", {"forward.0": "fast"}, "none, pipelined, bulk, pipelined:chunks=N or bulk:chunks=N"),
        ("plan", {"forward.0": None}, "none, pipelined, bulk"),
        ("plan", "/nowhere/plan.json", "a readable JSON file"),
        ("plan", 7, "a dict {site pattern: strategy}"),
        ("plan", ["forward.0"], "a dict {site pattern: strategy}"),
    ],
)
def test_bad_value_names_option_value_and_allowed(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse({name: value}, NAMES)
    text = str(caught.value)
    assert repr(name) in text
    assert repr(value).strip("[]{}") in text
    assert allowed in text


def test_unknown_option_suggests_a_near_one() -> None:
    with pytest.raises(OptionError, match="overlapp='force'") as caught:
        parse({"overlapp": "force"}, NAMES)
    assert "did you mean overlap" in str(caught.value)


@pytest.mark.parametrize("beside", [{"shape_padding": False}, {"mode": "max-autotune"}])
def test_aot_eager_takes_nothing_of_inductor(beside: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="aot_eager"):
        parse({"inner": "aot_eager", **beside}, NAMES)


def test_ours_and_theirs() -> None:
    ours, theirs = parse({"overlap": "off", "shape_padding": False, "timeout_s": 3}, NAMES)
    assert (ours, theirs) == (Options(overlap="off", timeout_s=3.0), {"shape_padding": False})
    assert parse(None, NAMES) == (Options(), {})


def test_key_covers_what_graphs_depend_on() -> None:
    changed = [
        {"overlap": "force"}, {"min_bytes": 1}, {"chunks": 4}, {"save": "shard"}, {"on_miss": "warn"}, {"mode": "max-autotune"},
        {"merge_all_reduces": False}, {"inner": "aot_eager"}, {"plan": {"*": "bulk"}},
    ]  # fmt: skip
    keys = {parse(c, NAMES)[0].key() for c in changed}
    assert len(keys | {Options().key()}) == len(changed) + 1
    assert Options(timeout_s=1.0).key() == Options().key()


def test_plan_in_all_forms(tmp_path: Path) -> None:
    rows = {"forward.*": "bulk", "forward.0": "pipelined:chunks=4"}
    plain, stored = tmp_path / "plain.json", tmp_path / "stored.json"
    plain.write_text(json.dumps(rows))
    stored.write_text(PLAN.to_json())
    pairs = tuple(rows.items())
    assert [parse({"plan": form}, NAMES)[0].plan for form in (rows, plain, str(plain), list(pairs))] == [pairs] * 4
    decided = (("forward.0", "pipelined:chunks=4"), ("forward.1", "none"))
    assert [parse({"plan": form}, NAMES)[0].plan for form in (PLAN, stored, json.loads(PLAN.to_json()))] == [decided] * 3


def test_last_matching_pattern_wins() -> None:
    ours, _ = parse({"plan": {"*": "none", "forward.*": "bulk", "forward.1": "pipelined"}}, NAMES)
    assert ours.forced("forward.1") == Strategy(Mode.PIPELINED)
    assert ours.forced("forward.10") == Strategy(Mode.BULK)
    assert ours.forced("backward.0") == Strategy(Mode.NONE)
    assert Options().forced("forward.0") is None


def test_bad_option_at_compile_time() -> None:
    with pytest.raises(Exception, match="unknown option 'overlapp'"):
        torch.compile(torch.sin, backend="ub_overlap", options={"overlapp": 1})(torch.ones(2))


class Seen:
    """A user's pass that notes where it ran and a setting of Inductor at that time."""

    def __init__(self, note: str) -> None:
        self.note, self.values = note, list[Any]()

    def __call__(self, graph: Graph) -> None:
        assert any(n.op == "output" for n in graph.nodes)
        self.values.append(getattr(torch._inductor.config, self.note))


def doubled(x: Tensor) -> Tensor:
    return x * 2 + 1


def compiled(**kwargs: Any) -> None:
    """Through Inductor up to its code, without caches."""
    torch._dynamo.reset()
    x = torch.randn(7, requires_grad=True)
    with uncached():
        y = torch.compile(doubled, backend="ub_overlap", **kwargs)(x)
        y.sum().backward()
    assert torch.equal(y, doubled(x))
    assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, 2))


@pytest.mark.parametrize("how", ["option", "config"])
def test_users_passes_still_run(how: str) -> None:
    joint, post = Seen("shape_padding"), Seen("shape_padding")
    hooks = {"joint_custom_pre_pass": joint, "post_grad_custom_pre_pass": post}
    if how == "option":
        compiled(options=hooks)
    else:
        with torch._inductor.config.patch(hooks):
            compiled()
    assert (len(joint.values), len(post.values)) == (1, 2)


def test_inductor_option_by_name() -> None:
    before = torch._inductor.config.shape_padding
    post = Seen("shape_padding")
    compiled(options={"shape_padding": not before, "post_grad_custom_pre_pass": post})
    assert set(post.values) == {not before}
    assert torch._inductor.config.shape_padding is before


@pytest.mark.parametrize("how", ["alone", "option"])
def test_mode_reaches_inductor(how: str) -> None:
    post, mode = Seen("max_autotune"), "max-autotune-no-cudagraphs"
    if how == "alone":
        with torch._inductor.config.patch(post_grad_custom_pre_pass=post):
            compiled(mode=mode)
    else:
        compiled(options={"mode": mode, "post_grad_custom_pre_pass": post})
    assert set(post.values) == {True}


def miss(rank: int, world: int, on_miss: str) -> tuple[str, list[str]]:
    """(error, warnings) of a permuted gather, which cannot be overlapped."""
    case = build(rank, world, "tests.models.forms", {"name": "relu_scatter"})
    with warnings.catch_warnings(record=True) as caught, uncached():
        warnings.simplefilter("always")
        try:
            function = torch.compile(case.module, backend="ub_overlap", options={**FORCE, "on_miss": on_miss})
            as_loss(function(*case.inputs))
        except Exception as error:  # noqa: BLE001 (torch may wrap it; the text goes to the test)
            return f"{type(getattr(error, 'inner_exception', error)).__name__}: {error}", []
    return "", [str(w.message) for w in caught if "ub_overlap" in str(w.message)]


def test_on_miss(pool2: RankPool) -> None:
    assert pool2.run(miss, "ignore") == [("", [])] * 2
    for error, told in pool2.run(miss, "warn"):
        assert not error
        assert len(told) == 1 and "forward.0" in told[0] and "non_linear" in told[0] and "forms.py" in told[0]
    for error, _ in pool2.run(miss, "error"):
        assert error.startswith(MissError.__name__)
        assert "forward.0" in error and "non_linear" in error and "forms.py" in error


def test_left_alone_by_choice_is_no_miss() -> None:
    assert [d.id for d in missed(PLAN)] == ["forward.1"]
