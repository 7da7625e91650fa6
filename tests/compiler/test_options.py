"""Options: valid values, errors, and the options that reach Inductor."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph

import ub_overlap
from tests.compiler.rank_compile import FUSED, build
from tests.compiler.test_plan import PLAN
from tests.harness.ranks import RankPool
from tests.harness.traces import as_loss
from tests.models.compare import uncached
from ub_overlap.compiler.fp8_config import Fp8Config, describe_fp8
from ub_overlap.compiler.options import NAMES as NAMES_OF_OPTIONS
from ub_overlap.compiler.options import RENAMED, Options, describe_options, options_table, parse
from ub_overlap.compiler.overrides.override_set import Overrides, parse_overrides
from ub_overlap.compiler.overrides.rule import SiteDescription
from ub_overlap.compiler.passes import JointPass
from ub_overlap.compiler.unmatched import find_unmatched
from ub_overlap.runtime import settings
from ub_overlap.runtime.errors import MissError, OptionError

NAMES = frozenset({"shape_padding", "max_autotune"})


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("overlap", "always", "'auto', 'force', 'off'"),
        ("on_unmatched", True, "'ignore', 'warn', 'error'"),
        ("inner", "eager", "'inductor', 'aot_eager'"),
        ("autotune", 1, "True"),
        ("min_bytes", -1, "an integer of at least 0"),
        ("min_bytes", 1.5, "an integer of at least 0"),
        ("mode", "max-autotuned", "'max-autotune'"),
        ("mode", 3, "'max-autotune'"),
        ("memory_budget", -0.5, "a share from 0 to 1, or bytes"),
        ("memory_budget", True, "a share from 0 to 1, or bytes"),
        ("fp8", "most", "'off', 'forward', 'all'"),
        ("fp8", {"recipe": "columns"}, "'tensorwise', 'delayed', 'rowwise'"),
        (
            "overrides",
            {"forward.0": "fast"},
            "auto, none, pipelined, direct, bulk, split, one_shot, two_shot",
        ),
        ("overrides", {"forward.0": "chunks=65"}, "N from 1 to 64"),
        ("overrides", {"forward.0": None}, "none, pipelined, direct, bulk"),
        ("overrides", "/nowhere/plan.json", "a JSON or YAML file"),
        ("overrides", 7, "a dict {site pattern: strategy}"),
        ("overrides", [7], "a dict {site pattern: strategy}"),
    ],
)
def test_bad_value_names_option_value_and_allowed(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse({name: value}, NAMES)
    text = str(caught.value)
    assert repr(name) in text
    assert str(value).strip("[]{}").split(": ")[-1] in text
    assert allowed in text


def test_unknown_option_suggests_a_near_one() -> None:
    with pytest.raises(OptionError, match="overlapp='force'") as caught:
        parse({"overlapp": "force"}, NAMES)
    assert "did you mean overlap" in str(caught.value)


@pytest.mark.parametrize("name", RENAMED)
def test_old_names_say_the_new_spelling(name: str) -> None:
    with pytest.raises(OptionError, match=f"'{name}' was renamed") as caught:
        parse({name: "shard" if name == "save" else 4}, NAMES)
    new = caught.value.expected.split("=")[0].removeprefix("ub_overlap.")
    assert new in {field for field, _, _ in describe_options()} or new.startswith("configure(")


def test_tables_are_complete() -> None:
    """One row per option, field of fp8, and setting; defaults come first."""
    described = describe_options()
    rows = {name: (values, doc) for name, values, doc in described}
    assert len(rows) == len(described) and set(rows) == set(NAMES_OF_OPTIONS)
    assert rows["overlap"][0] == '`"auto"`, `"force"`, `"off"`' and rows["verify"][0] == "`False`, `True`"
    assert all(values and doc for values, doc in rows.values())
    assert [name for name, _, _ in describe_fp8()] == ["products", "recipe", "weights", "state", "filter", "reduce_scatter"]
    settings_rows = {row[0]: row[1:] for row in settings.describe_settings()}
    assert settings_rows["step_timeout_s"][:2] == ("UB_OVERLAP_STEP_TIMEOUT_S", "100")
    assert options_table().count("\n") == len(rows) + 1


@pytest.mark.parametrize("others", [{"shape_padding": False}, {"mode": "max-autotune"}])
def test_aot_eager_takes_nothing_of_inductor(others: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="aot_eager"):
        parse({"inner": "aot_eager", **others}, NAMES)


def test_ours_and_theirs() -> None:
    ours, theirs = parse({"overlap": "off", "shape_padding": False, "min_bytes": 3}, NAMES)
    assert (ours, theirs) == (Options(overlap="off", min_bytes=3), {"shape_padding": False})
    assert parse(None, NAMES) == (Options(), {})


def test_key_covers_what_graphs_depend_on() -> None:
    changed = [
        {"overlap": "force"}, {"min_bytes": 1}, {"overrides": {"*": "chunks=4"}}, {"memory_budget": 0},
        {"on_unmatched": "warn"},
        {"mode": "max-autotune"}, {"inner": "aot_eager"}, {"overrides": {"*": "bulk"}}, {"overrides": [{"strategy": "bulk"}]},
        {"fp8": "forward"}, {"fp8": "all"}, {"fp8": {"state": "a"}}, {"autotune": True}, {"verify": True},
    ]  # fmt: skip
    keys = {parse(c, NAMES)[0].key() for c in changed}
    assert len(keys | {Options().key()}) == len(changed) + 1


def test_settings_that_change_graphs_are_part_of_the_cache_key() -> None:
    before = JointPass(Options()).uuid()
    try:
        settings.configure(step_timeout_s=60, snapshots=False)
        assert JointPass(Options()).uuid() == before
        settings.configure(merge_collectives=False)
        assert JointPass(Options()).uuid() != before
    finally:
        settings.configure(step_timeout_s=100, snapshots=True, merge_collectives=True)


@pytest.mark.parametrize("form", ["all", {"products": "all"}, {}, Fp8Config(products="all")])
def test_forms_of_fp8(form: Any) -> None:
    assert parse({"fp8": form}, NAMES)[0].fp8 == Fp8Config() == Fp8Config(products="all", recipe="tensorwise")
    assert parse({"fp8": "off"}, NAMES)[0] == parse({"fp8": None}, NAMES)[0] == Options()


def test_patterns_and_plans_in_all_forms(tmp_path: Path) -> None:
    rows = {"forward.*": "bulk", "forward.0": "pipelined:chunks=4"}
    plain, stored = tmp_path / "plain.json", tmp_path / "stored.json"
    plain.write_text(json.dumps(rows))
    stored.write_text(PLAN.to_json())
    pairs = tuple(rows.items())
    forms = (rows, plain, str(plain), list(pairs), [rows], [str(plain)])
    assert [parse({"overrides": form}, NAMES)[0].overrides for form in forms] == [Overrides(patterns=pairs)] * len(forms)
    sites = [
        [(s.id, s.strategy) for g in parse_overrides(f).saved for s in g.sites]
        for f in (PLAN, stored, json.loads(PLAN.to_json()))
    ]
    assert sites == [[("forward.0", "pipelined:chunks=4"), ("forward.1", "none")]] * 3


def site(id: str, ranks: int = 4) -> SiteDescription:
    return SiteDescription(
        id=id, phase=id.split(".")[0], kinds=("all_gather", "all_gather_matmul"), modules=("wq",), ranks=ranks
    )


def requests(value: Any, *ids: str) -> list[tuple[str, int] | None]:
    """Return (strategy, chunks) per site."""
    overrides = parse({"overrides": value}, NAMES)[0].overrides.find(ids[0].split(".")[0], [site(i) for i in ids])
    return [(str(o.strategy), o.chunks) if (o := overrides.get(i)) else None for i in ids]


def test_last_matching_pattern_wins() -> None:
    value = {"*": "none", "forward.*": "bulk", "forward.1": "pipelined"}
    assert requests(value, "forward.1", "forward.10") == [("pipelined", 0), ("bulk", 0)]
    assert requests(value, "backward.0") == [("none", 0)]
    assert requests(None, "forward.0") == [None]


def test_patterns_win_over_rules() -> None:
    value = [{"forward.0": "pipelined", "forward.2": "auto"}, {"module": "wq", "strategy": "bulk"}]
    assert requests(value, "forward.0", "forward.1", "forward.2") == [("pipelined", 0), ("bulk", 0), None]


@pytest.mark.parametrize("value", [{"*": "chunks=R/2"}, [{"strategy": "chunks=2"}], [{"module": "wq", "strategy": "chunks=2"}]])
def test_chunks_leave_the_strategy_open(value: Any) -> None:
    assert requests(value, "forward.0") == [("None", 2)]


def test_bad_option_at_compile_time() -> None:
    with pytest.raises(Exception, match="unknown option 'overlapp'"):
        torch.compile(torch.sin, backend="ub_overlap", options={"overlapp": 1})(torch.ones(2))


class Seen:
    """A user's pass that records a setting of Inductor at each call."""

    def __init__(self, note: str) -> None:
        self.note, self.values = note, list[Any]()

    def __call__(self, graph: Graph) -> None:
        assert any(n.op == "output" for n in graph.nodes)
        self.values.append(getattr(torch._inductor.config, self.note))


def doubled(x: Tensor) -> Tensor:
    return x * 2 + 1


def compiled(**kwargs: Any) -> None:
    """Compile with Inductor, without caches, and compare with eager."""
    torch._dynamo.reset()
    x = torch.randn(7, requires_grad=True)
    with uncached():
        y = torch.compile(doubled, backend="ub_overlap", **kwargs)(x)
        y.sum().backward()
    assert torch.equal(y, doubled(x))
    assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, 2))


@pytest.mark.tier("test")
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


@pytest.mark.tier("test")
def test_passes_are_options_of_inductor() -> None:
    joint, post = Seen("max_autotune"), Seen("max_autotune")
    hooks = {"joint_custom_pre_pass": joint, "post_grad_custom_pre_pass": post}
    options = ub_overlap.passes({"overlap": "off", "mode": "max-autotune-no-cudagraphs", **hooks})
    assert {"max_autotune", *hooks} <= set(options)
    torch._dynamo.reset()
    with uncached():
        torch.compile(doubled, options=options)(torch.randn(7, requires_grad=True)).sum().backward()
    assert (joint.values, post.values) == ([True], [True, True])
    with pytest.raises(OptionError, match=r"passes needs Inductor"):
        ub_overlap.passes({"inner": "aot_eager"})


@pytest.mark.tier("test")
def test_inductor_option_by_name() -> None:
    before = torch._inductor.config.shape_padding
    post = Seen("shape_padding")
    compiled(options={"shape_padding": not before, "post_grad_custom_pre_pass": post})
    assert set(post.values) == {not before}
    assert torch._inductor.config.shape_padding is before


@pytest.mark.tier("test")
@pytest.mark.parametrize("how", ["alone", "option"])
def test_mode_reaches_inductor(how: str) -> None:
    post, mode = Seen("max_autotune"), "max-autotune-no-cudagraphs"
    if how == "alone":
        with torch._inductor.config.patch(post_grad_custom_pre_pass=post):
            compiled(mode=mode)
    else:
        compiled(options={"mode": mode, "post_grad_custom_pre_pass": post})
    assert set(post.values) == {True}


def miss(rank: int, world: int, on_unmatched: str) -> tuple[str, list[str]]:
    """Return (error, warnings) of a permuted gather, which cannot be overlapped."""
    case = build(rank, world, "tests.models.forms", {"name": "relu_scatter"})
    with warnings.catch_warnings(record=True) as caught, uncached():
        warnings.simplefilter("always")
        try:
            function = torch.compile(case.module, backend="ub_overlap", options={**FUSED, "on_unmatched": on_unmatched})
            as_loss(function(*case.inputs))
        except Exception as error:  # noqa: BLE001 (torch may wrap it; the text goes to the test)
            return f"{type(getattr(error, 'inner_exception', error)).__name__}: {error}", []
    return "", [str(w.message) for w in caught if "ub_overlap" in str(w.message)]


def test_on_unmatched(pool2: RankPool) -> None:
    assert pool2.run(miss, "ignore") == [("", [])] * 2
    for error, messages in pool2.run(miss, "warn"):
        assert not error
        assert len(messages) == 1 and "forward.0" in messages[0] and "non_linear" in messages[0] and "forms.py" in messages[0]
    for error, _ in pool2.run(miss, "error"):
        assert error.startswith(MissError.__name__)
        assert "forward.0" in error and "non_linear" in error and "forms.py" in error


def test_left_alone_by_choice_is_not_unmatched() -> None:
    assert [d.id for d in find_unmatched(PLAN)] == ["forward.1"]
