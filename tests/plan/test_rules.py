"""Tests of rules: matching, errors, and effects on a graph."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.compiler.rank_compile import FORCE, build, check, decisions_of
from tests.harness.fake_ranks import FakeRanks
from tests.harness.ranks import RankPool
from tests.harness.tiers import INNER
from ub_overlap.compiler.options import Options, parse
from ub_overlap.compiler.overrides.override_set import parse_overrides
from ub_overlap.compiler.overrides.requested_strategy import override_of
from ub_overlap.compiler.overrides.rule import Rule, SiteDescription, find_rule
from ub_overlap.compiler.overrides.unmatched_patterns import UnmatchedPatterns
from ub_overlap.compiler.plan.strategy import Mode, Strategy
from ub_overlap.runtime.errors import OptionError

NAMES: frozenset[str] = frozenset()
LLAMA = "tests.models.dtensor_llama"


def parse_rules(rows: list[dict[str, Any]]) -> tuple[Rule, ...]:
    return parse_overrides(rows).rules


def place(**changes: Any) -> SiteDescription:
    base: dict[str, Any] = {
        "id": "forward.0", "phase": "forward", "kinds": ("all_gather", "all_gather_matmul"),
        "modules": ("layers.0.attention.wq", "layers.0.attention"), "ranks": 8,
    }  # fmt: skip
    return SiteDescription(**{**base, **changes})


@pytest.mark.parametrize(
    ("rule", "matches"),
    [
        ({}, True),
        ({"module": "layers.0.attention.wq"}, True),
        ({"module": "layers.0"}, True),
        ({"module": "layers.1"}, False),
        ({"module": "*.wq"}, True),
        ({"module": "wq"}, False),
        ({"module": ["*.w9", "layers.*.attention"]}, True),
        ({"module": "attention"}, False),
        ({"kind": "all_gather"}, True),
        ({"kind": "all_gather_matmul"}, True),
        ({"kind": "matmul_*"}, False),
        ({"phase": "forward"}, True),
        ({"phase": "backward"}, False),
        ({"module": "layers.0", "kind": "all_gather*", "phase": "forward"}, True),
        ({"module": "layers.1", "kind": "all_gather*", "phase": "forward"}, False),
    ],
    ids=str,
)
def test_matching(rule: dict[str, Any], matches: bool) -> None:
    (parsed,) = parse_rules([{**rule, "strategy": "bulk"}])
    assert parsed.matches(place()) is matches


def test_a_module_at_the_root_is_anywhere() -> None:
    (rule,) = parse_rules([{"module": "*.wq", "strategy": "none"}])
    assert rule.matches(place(modules=("wq",)))
    assert not rule.matches(place(modules=("xwq",)))
    assert not rule.matches(place(modules=()))


def test_last_matching_rule_wins_and_auto_gives_back() -> None:
    rules = parse_rules(
        [
            {"strategy": "none"},
            {"module": "layers.0", "strategy": "pipelined:chunks=R/2"},
            {"module": "*.wk", "strategy": "auto"},
            {"phase": "backward", "strategy": "bulk"},
        ]
    )
    forced = find_rule(rules, place())
    assert forced is not None and forced.strategy == Strategy(Mode.PIPELINED, 4)
    assert forced.by == "overrides[1] (module layers.0)"
    assert find_rule(rules, place(modules=("layers.0.attention.wk",))) is None
    assert str(find_rule(rules, place(phase="backward")).strategy) == "bulk"  # type: ignore[union-attr]
    assert str(find_rule(rules, place(modules=("layers.5",))).strategy) == "none"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "ranks", "strategy"),
    [
        ("pipelined:chunks=R/2", 8, "pipelined:chunks=4"),
        ("pipelined:chunks=R/2", 3, "pipelined:chunks=1"),
        ("pipelined:chunks=2R", 6, "pipelined:chunks=12"),
        ("bulk:chunks=R", 2, "bulk:chunks=2"),
        ("pipelined:stripes=4", 8, "pipelined:stripes=4"),
        ("direct", 8, "direct"),
    ],
)
def test_chunks_of_ranks(text: str, ranks: int, strategy: str) -> None:
    (rule,) = parse_rules([{"strategy": text}])
    assert str(override_of(rule.strategy, ranks, "").strategy) == strategy  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("value", "field", "got", "expected"),
    [
        (7, "overrides", "7", "a list of rules"),
        ({"layers": 1}, "overrides", "layers", "a list of rules"),
        ([3], "overrides[0]", "3", "a dict with strategy"),
        ([{"module": "a"}], "overrides[0].strategy", "nothing", "auto, none, pipelined"),
        ([{"strategy": "fast"}], "overrides[0].strategy", "fast", "auto, none, pipelined"),
        ([{"strategy": "bulk:stripes=2"}], "overrides[0].strategy", "bulk:stripes=2", "auto, none, pipelined"),
        ([{"strategy": "none"}, {"strategy": "pipelined:chunks=R/3"}], "overrides[1].strategy", "R/3", "R/2"),
        ([{"strategy": "none", "kind": "gather"}], "overrides[0].kind", "gather", "all_gather_matmul"),
        ([{"strategy": "none", "phase": "back"}], "overrides[0].phase", "back", "'forward' or 'backward'"),
        ([{"strategy": "none", "module": 3}], "overrides[0].module", "3", "a glob of module paths"),
        ([{"strategy": "none", "modules": "a"}], "overrides[0].modules", "a", "one of the fields module"),
    ],
    ids=str,
)
def test_bad_rules_name_field_got_and_expected(value: Any, field: str, got: str, expected: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse({"overrides": value}, NAMES)
    error = caught.value
    assert f"{field}=" in error.got and got in error.got and expected in error.expected


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rules.json"
    path.write_text('[{"strategy": "fast"}]')
    with pytest.raises(OptionError, match="rules.json, field overrides\\[0\\].strategy"):
        parse({"overrides": str(path)}, NAMES)
    path.write_text("[{")
    with pytest.raises(OptionError, match="rules.json") as caught:
        parse({"overrides": path}, NAMES)
    assert caught.value.expected == "JSON"


def test_rules_are_part_of_the_cache_key() -> None:
    first, second = (parse({"overrides": [{"strategy": s}]}, NAMES)[0] for s in ("none", "bulk"))
    assert len({first.key(), second.key(), Options().key()}) == 3
    assert parse({"overrides": [r.to_dict() for r in first.overrides.rules]}, NAMES)[0] == first


def warnings_of(unmatched: UnmatchedPatterns, phase: str, patterns: list[str], rules: list[dict[str, Any]]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        unmatched.check(phase, [place(phase=phase, id=f"{phase}.0")], patterns, parse_rules(rules))
    return [str(w.message) for w in caught]


def test_what_matches_nothing_is_reported_once() -> None:
    unmatched = UnmatchedPatterns()
    (text,) = warnings_of(
        unmatched, "forward", ["forward.7", "forward.*", "backward.9"], [{"module": "lyers", "strategy": "none"}]
    )
    assert "pattern 'forward.7'" in text and "overrides[0] (module lyers)" in text
    assert "forward.*" not in text and "backward.9" not in text
    assert "layers.0.attention.wq" in text, "says what there is"
    assert warnings_of(unmatched, "forward", ["forward.7"], [{"module": "lyers", "strategy": "none"}]) == []
    (text,) = warnings_of(unmatched, "backward", ["backward.9"], [{"module": "layers", "phase": "forward", "strategy": "none"}])
    assert "backward.9" in text and "rule" not in text


STRIPES = [
    {"kind": "matmul_*", "strategy": "pipelined:stripes=2"},
    {"module": "*.w2", "phase": "forward", "strategy": "pipelined:stripes=3"},
    {"module": "*.wo", "kind": "all_gather*", "strategy": "pipelined:chunks=2R"},
]


@pytest.mark.tier("full")
@pytest.mark.parametrize("inner", INNER)
def test_stripes_by_rules_compute_the_same(pool2: RankPool, inner: str) -> None:
    """Rules with stripes keep outputs and gradients of a sequence-parallel Llama block, and each site names its rule."""
    options = {"overlap": "force", "inner": inner, "overrides": [*STRIPES, {"backward.3": "pipelined"}]}
    for outcome in check(pool2, LLAMA, {"sequence": True}, options):
        by_site = {d["id"]: (d["strategy"], d["detail"]) for d in outcome.decisions}
        assert by_site["forward.1"] == (
            "pipelined:stripes=2", "pipelined:stripes=2 forced by overrides[0] (kind matmul_*)",
        )  # fmt: skip
        assert (
            by_site["forward.3"][0] == "pipelined:stripes=3"
            and "overrides[1] (module *.w2; forward)" in by_site["forward.3"][1]
        )
        assert by_site["forward.0"] == ("pipelined", "")
        assert by_site["backward.1"][0] == "pipelined:stripes=2"
        assert by_site["backward.2"][0] == "pipelined:chunks=4" and "overrides[2]" in by_site["backward.2"][1]
        assert by_site["backward.3"] == ("pipelined", "pipelined forced by overrides ('backward.3')"), "the pattern wins"


@pytest.mark.tier("full")
def test_stripes_of_an_all_reduce(pool2: RankPool) -> None:
    options = {**FORCE, "overrides": [{"kind": "matmul_all_reduce", "strategy": "pipelined:stripes=2"}]}
    for outcome in check(pool2, LLAMA, {"sequence": False}, options):
        assert {d["strategy"] for d in outcome.decisions if d["kind"] == "matmul_all_reduce"} == {"pipelined:stripes=2"}


@pytest.mark.tier("full")
def test_engine_copies_by_a_rule_compute_the_same(pool2: RankPool) -> None:
    """Gathers whose kept tensors and own shards the driver copies keep outputs and gradients."""
    rules = [{"kind": "all_gather*", "strategy": "pipelined:copies=engine"}]
    for outcome in check(pool2, LLAMA, {"sequence": True}, {**FORCE, "overrides": rules}):
        gathers = [d["strategy"] for d in outcome.decisions if d["kind"] == "all_gather_matmul"]
        assert len(gathers) > 2 and {*gathers} == {"pipelined:copies=engine"}


@pytest.mark.tier("full")
@pytest.mark.parametrize("sequence", [True, False], ids=["reduce_scatter", "all_reduce"])
def test_direct_by_rules_computes_the_same(pool2: RankPool, sequence: bool) -> None:
    """Rules with direct keep outputs and gradients of a Llama block, with the comparison of every site in the graph."""
    rules = [{"module": ["*.wo", "*.w2"], "kind": "matmul_*", "phase": "forward", "strategy": "direct"}]
    for outcome in check(pool2, LLAMA, {"sequence": sequence}, {**FORCE, "overrides": rules, "verify": True}):
        chosen = [d for d in outcome.decisions if d["strategy"] == "direct"]
        assert len(chosen) == 2 and all("forced by overrides[0]" in d["detail"] for d in chosen)
        assert {d["kind"] for d in chosen} == {"matmul_reduce_scatter" if sequence else "matmul_all_reduce"}
        assert all("direct" in d["options"] for d in chosen)


def illegal(rank: int, world: int) -> list[tuple[str, str | None, str]]:
    case = build(rank, world, "tests.models.megatron", {"dims": 2})
    options = {**FORCE, "overrides": [{"strategy": "pipelined:stripes=2"}, {"phase": "backward", "strategy": "none"}]}
    decisions = decisions_of(case.module, case.inputs, options)
    return [(str(d.strategy), d.reason.value if d.reason else None, d.detail) for d in decisions]


@pytest.mark.tier("test")
def test_illegal_stripes_leave_a_site_alone(fake2: FakeRanks) -> None:
    for gather, scatter, *backward in fake2.run(illegal):
        assert gather[:2] == ("none", "strategy_illegal")
        assert "shards are gathered" in gather[2] and "overrides[0] (any site)" in gather[2]
        assert scatter[:2] == ("pipelined:stripes=2", None)
        assert backward == [("none", "disabled_by_user", "overrides[1] (backward) says none")] * 2
