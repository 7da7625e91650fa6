"""Tests of saved plans: applied to matching graphs; errors for other files and for graphs that differ."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.compiler.rank_compile import FORCE, build, plans_of
from tests.compiler.test_plan import PLAN
from tests.harness.fake_ranks import FakeRanks
from ub_overlap.compiler.options import parse
from ub_overlap.compiler.overrides.override_set import parse_overrides
from ub_overlap.compiler.overrides.rule import SiteDescription
from ub_overlap.compiler.overrides.saved_plan import match_saved_graph, parse_saved_plan
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.runtime.errors import OptionError

MEGATRON = "tests.models.megatron"


def stored(**changes: Any) -> dict[str, Any]:
    return {**json.loads(PLAN.to_json()), **changes}


def with_site(number: int, **changes: Any) -> dict[str, Any]:
    plan = stored()
    plan["sites"][number] = {**plan["sites"][number], **changes}
    return plan


@pytest.mark.parametrize(
    ("content", "field", "got", "expected"),
    [
        (stored(version=9), "version", "9", "1 or 2 or 3"),
        ({"sites": []}, "version", "None", "1 or 2 or 3"),
        (stored(sites={}), "sites", "{}", "a list of sites"),
        (stored(sites=["forward.0"]), "sites[0]", "'forward.0'", "a site"),
        (with_site(1, strategy="fast"), "sites[1].strategy", "'fast'", "pipelined:chunks=N"),
        (with_site(0, strategy=3), "sites[0].strategy", "3", "a text"),
        (with_site(0, kind="gather"), "sites[0].kind", "'gather'", "all_gather_matmul"),
        (with_site(0, phase="back"), "sites[0].phase", "'back'", "'forward' or 'backward'"),
        (with_site(0, ranks="2"), "sites[0].ranks", "'2'", "a number"),
        (with_site(0, id=None), "sites[0].id", "None", "a text"),
        (with_site(0, paired=2), "sites[0].paired", "2", "a list of the independent matmuls"),
        ({"optimizer": {"lr": 1}}, "optimizer", "{'lr': 1}", "none, pipelined, direct, bulk"),
        ([1, 2], "overrides[0]", "1", "a dict {site pattern: strategy}"),
    ],
    ids=str,
)
def test_bad_files(tmp_path: Path, content: Any, field: str, got: str, expected: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(content))
    with pytest.raises(OptionError) as caught:
        parse({"overrides": str(path)}, frozenset())
    error = caught.value
    assert f"file {path}" in error.where and got in error.got and expected in error.expected
    assert field in error.where or field == "overrides"


def test_a_broken_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(PLAN.to_json()[:40])
    with pytest.raises(OptionError, match="plan.json"):
        parse({"overrides": str(path)}, frozenset())


# The sites of PLAN as described by a graph.
PLACES = [
    SiteDescription(
        id=d.id, phase=d.phase, kinds=("all_gather", d.kind.value), modules=(d.module, "layers.0"), ranks=d.ranks,
        dtype=d.dtype, input=dict(d.shapes)["input"],
    )
    for d in PLAN.decisions[:2]
]  # fmt: skip


def test_a_plan_that_fits_forces_its_sites() -> None:
    graphs = parse_overrides(PLAN).saved
    overrides = match_saved_graph(graphs, "forward", PLACES)
    assert {i: str(f.strategy) for i, f in overrides.items()} == {"forward.0": "pipelined:chunks=4", "forward.1": "none"}
    assert match_saved_graph(graphs, "backward", PLACES) == {}, "a plan says nothing of phases that it has no graph of"


@pytest.mark.parametrize(
    ("number", "changes", "field", "got"),
    [
        (0, {"ranks": 4}, "ranks", "ranks=4"),
        (0, {"kinds": ("reduce_scatter",)}, "collective", "'reduce_scatter'"),
        (1, {"dtype": "bfloat16"}, "dtype", "'bfloat16'"),
        (1, {"modules": ("layers.1.wq", "layers.1")}, "module", "layers.1.wq, layers.1"),
    ],
    ids=str,
)
def test_the_first_site_that_differs_is_named(number: int, changes: dict[str, Any], field: str, got: str) -> None:
    graphs = parse_overrides(PLAN).saved
    places = [replace(p, **changes) if i >= number else p for i, p in enumerate(PLACES)]
    with pytest.raises(OptionError) as caught:
        match_saved_graph(graphs, "forward", places)
    assert f"site forward.{number}, field {field}" in caught.value.where and got in caught.value.got
    assert "the first site that differs is" in caught.value.what


def test_another_number_of_sites() -> None:
    graphs = parse_overrides(PLAN).saved
    with pytest.raises(OptionError, match="forward.1, field number of sites") as caught:
        match_saved_graph(graphs, "forward", PLACES[:1])
    assert "=1 in" in caught.value.got and "=2 in" in caught.value.expected
    with pytest.raises(OptionError, match="forward.2, field number of sites"):
        match_saved_graph(graphs, "forward", [*PLACES, replace(PLACES[1], id="forward.2")])


def test_of_several_graphs_the_one_that_fits_is_taken() -> None:
    """The matching graph of a plan is selected. A graph break gives two forward graphs, each with a forward.0."""
    other = Plan("forward", tuple(replace(d, module="head") for d in PLAN.decisions[:1]))
    rows = [{**d.to_dict(), "plan": p.digest} for p in (other, PLAN) for d in p.decisions]
    graphs = parse_saved_plan({"version": 1, "plans": [other.digest, PLAN.digest], "sites": rows}, "")
    assert len(graphs) == 2
    assert set(match_saved_graph(graphs, "forward", PLACES)) == {"forward.0", "forward.1"}
    assert set(match_saved_graph(graphs, "forward", [replace(PLACES[0], modules=("head",))])) == {"forward.0"}
    with pytest.raises(OptionError, match="forward.1"):  # compared with the graph with the longest matching prefix
        match_saved_graph(graphs, "forward", [PLACES[0], replace(PLACES[1], ranks=3)])


def test_other_sizes_are_a_warning() -> None:
    graphs = parse_overrides(PLAN).saved
    with pytest.warns(UserWarning, match=r"forward.0 has input \[4, 64\], in the plan \[8, 64\]"):
        assert match_saved_graph(graphs, "forward", [replace(PLACES[0], input="[4, 64]"), PLACES[1]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert match_saved_graph(graphs, "forward", [replace(PLACES[0], input="[s0, 64]"), PLACES[1]]), (
            "dynamic sizes are no other sizes"
        )


def saved_and_loaded(rank: int, world: int, path: str) -> tuple[list[tuple[str, str]], str, str]:
    """Return the decisions under a plan saved from the same model with other strategies, and the error of another model."""
    case = build(rank, world, MEGATRON, {"dims": 2})
    plans = plans_of(
        case.module, case.inputs, {**FORCE, "overrides": {"*.0": "none", "*.1": "pipelined:stripes=2", "backward.1": "bulk"}}
    )
    mine = f"{path}.{rank}"
    rows = [{**d.to_dict(), "plan": p.digest} for p in plans for d in p.decisions]
    Path(mine).write_text(json.dumps({"version": 1, "plans": [p.digest for p in plans], "sites": rows}))
    case = build(rank, world, MEGATRON, {"dims": 2})
    again = plans_of(case.module, case.inputs, {**FORCE, "overrides": mine})
    other = build(rank, world, "tests.models.dtensor_llama", {"sequence": False})
    try:
        plans_of(other.module, other.inputs, {**FORCE, "overrides": mine})
        error = ""
    except Exception as e:  # noqa: BLE001 (torch wraps it)
        error = f"{type(getattr(e, 'inner_exception', e)).__name__}: {e}"
    return [(d.id, str(d.strategy)) for p in again for d in p.decisions], error, str(mine)


@pytest.mark.tier("test")
def test_through_compile(fake2: FakeRanks, tmp_path: Path) -> None:
    for sites, error, path in fake2.run(saved_and_loaded, str(tmp_path / "plan.json")):
        assert dict(sites)["forward.0"] == "none"
        assert dict(sites)["forward.1"] == "pipelined:stripes=2"
        assert error.startswith("OptionError") and "the first site that differs is forward.0" in error and path in error
        assert "all_reduce" in error and "all_gather" in error
