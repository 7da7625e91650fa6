"""Tests of reports with predictions, measurements and timelines."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import ub_overlap
from tests.compiler.rank_compile import FORCE, build
from tests.compiler.test_plan import GONE, LEFT, SITE
from tests.harness.fake_ranks import FakeRanks
from tests.harness.ranks import RankPool
from tests.models.compare import uncached
from ub_overlap.compiler.cost.predict import predict
from ub_overlap.compiler.cost.profile_lookup import load
from ub_overlap.compiler.plan.decision import SiteSizes
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.plan.reasons import Kind
from ub_overlap.compiler.plan.step_kind import step_kind
from ub_overlap.compiler.plan.strategy import NONE, Mode, Strategy
from ub_overlap.compiler.reports.measured import StepTime
from ub_overlap.compiler.reports.outlook import outlook, site_shape_of, totals
from ub_overlap.compiler.reports.timeline import Lane, trace_events, write_timeline
from ub_overlap.runtime import settings
from ub_overlap.runtime.errors import OptionError

H200 = load("h200")
WORK = SiteSizes(
    kind="all_gather_matmul", ranks=8, dtype="bfloat16", matmuls=((8192, 1024, 8192, False), (8192, 128, 8192, False)),
    rows=8192, cols=8192,
)  # fmt: skip
ALONE = replace(WORK, kind="bulk_all_gather", matmuls=())
SITE8 = replace(SITE, ranks=8, dtype="bfloat16", work=WORK, strategy=Strategy(Mode.PIPELINED))


def test_a_decision_keeps_its_work_in_json() -> None:
    plan = Plan("forward", (replace(SITE8, work=replace(WORK, keep=True, outer=2)), LEFT, GONE))
    assert Plan.from_json(plan.to_json()) == plan
    old = json.loads(plan.to_json())
    for site in old["sites"]:
        del site["work"]
    assert Plan.from_json(json.dumps(old)).decisions[0].work is None, "plans stored before there was one"


def test_an_outlook_is_the_cost_models() -> None:
    shape = site_shape_of(SITE8)
    assert shape is not None and (shape.kind, shape.ranks, shape.matmuls) == ("all_gather_matmul", 8, WORK.matmuls)
    prediction = outlook(SITE8, H200)
    assert prediction is not None
    assert prediction.none == predict(shape, NONE, H200) and prediction.chosen == predict(shape, SITE8.strategy, H200)
    assert prediction.gain_us == prediction.none.us - prediction.chosen.us
    assert prediction.by_strategy[prediction.best].us <= prediction.none.us
    forced = outlook(replace(SITE8, strategy=Strategy(Mode.PIPELINED, 64)), H200)
    assert forced is not None and forced.decided == "pipelined:chunks=64", "what was forced is predicted too"
    assert set(forced.by_strategy) == {*prediction.by_strategy, "pipelined:chunks=64"}


@pytest.mark.parametrize(
    ("changes", "known"),
    [
        ({"work": None}, None),
        ({"work": replace(WORK, kind="bulk_reduce_scatter"), "strategy": Strategy(Mode.BULK)}, "bulk_reduce_scatter"),
        ({"work": ALONE, "kind": Kind.ALL_GATHER, "strategy": NONE}, "bulk_all_gather"),
    ],
    ids=str,
)
def test_what_the_model_knows(changes: dict[str, Any], known: str | None) -> None:
    decision = replace(SITE8, **changes)
    shape = site_shape_of(decision)
    assert (shape.kind if shape else None) == known
    prediction = outlook(decision, H200)
    assert (prediction is None) == (known is None)
    if prediction is not None and decision.work is not None and not decision.work.matmuls:
        assert prediction.none.us == prediction.none.communication_us > 0 and prediction.gain_us == 0


def test_totals() -> None:
    single = outlook(SITE8, H200)
    alone = outlook(replace(SITE8, kind=Kind.ALL_GATHER, strategy=NONE, work=ALONE), H200)
    assert single is not None and alone is not None
    sums = totals([single, alone, None])
    assert (sums.sites, sums.unknown) == (2, 1)
    assert sums.none_us == single.none.us + alone.none.us and sums.chosen_us == single.chosen.us + alone.none.us
    assert sums.hidden == pytest.approx((single.none.us - single.chosen.us) / (sums.none_us - sums.matmul_us))
    assert "1 more without a prediction" in str(sums)


@dataclass(frozen=True)
class Explained:
    rows: list[dict[str, Any]]
    table: str
    text: str
    events: list[dict[str, Any]]
    trace_after: bool
    png: str


def explain(rank: int, world: int, folder: str, measure: bool) -> Explained:
    case = build(rank, world, "tests.models.megatron", {"gated": True, "dims": 2})
    options = {**FORCE, "overrides": {"backward.1": "none"}}
    with uncached():
        report = ub_overlap.explain(case.module, options, measure=measure)(*case.inputs)
    path = report.timeline(Path(folder) / f"step.{rank}.json")
    timeline = report.timeline(Path(folder) / f"one.{rank}.json", site="forward.1", predicted=not measure)
    assert {e["cat"] for e in json.loads(timeline.read_text())["traceEvents"] if "cat" in e} == {"forward.1"}
    png = ""
    try:
        report.timeline(Path(folder) / f"step.{rank}.png", site="forward.0")
    except OptionError as e:
        png = str(e)
    trace_events = json.loads(path.read_text())["traceEvents"]
    rows = json.loads(report.to_json())["sites"]
    return Explained(rows, report.table(), str(report), trace_events, settings.current().trace, png)


def test_measured_and_predicted(pool2: RankPool, tmp_path: Path) -> None:
    for explained in pool2.run(explain, str(tmp_path), True):
        by_id = {row["id"]: row for row in explained.rows}
        for name in ("forward.0", "forward.1", "backward.0"):
            row = by_id[name]
            assert row["calls"] == 4, "once, then three times measured"
            assert 0 < row["measured_us"] < 5e6
            assert row["choice"] == "pipelined" and row["predicted_us"]["pipelined"] > 0
            assert row["gain_us"] == pytest.approx(row["predicted_us"]["none"] - row["predicted_us"]["pipelined"], abs=0.01)
        left = by_id["backward.1"]
        assert left["measured_us"] is None and left["choice"] == "none" and "pipelined" in left["predicted_us"]
        head = explained.table.splitlines()[0]
        assert all(name in head for name in ("line", "matmul us", "comm us", "predicted us", "gain us", "measured us"))
        assert "megatron.py:" in explained.table and "3 measured sites took" in explained.text
        assert not explained.trace_after
        lanes = {e["args"]["name"]: e["pid"] for e in explained.events if e["name"] == "process_name"}
        assert set(lanes) == {"predicted", "measured"}
        for what, pid in lanes.items():
            steps = [e for e in explained.events if e["ph"] == "X" and e["pid"] == pid]
            wanted = set(by_id) if what == "predicted" else set(by_id) - {"backward.1"}
            assert {e["cat"] for e in steps} == wanted and all(e["dur"] >= 0 and e["ts"] >= 0 for e in steps)
            assert any(e["name"].startswith("matmul") for e in steps)
            # without matplotlib the message names the install command
        assert not explained.png or "pip install matplotlib" in explained.png


@pytest.mark.tier("test")
def test_unmeasured(fake2: FakeRanks, tmp_path: Path) -> None:
    for explained in fake2.run(explain, str(tmp_path), False):
        assert {row["calls"] for row in explained.rows if row["strategy"] != "none"} == {1}
        assert {row["measured_us"] for row in explained.rows} == {None}
        assert "measured" not in explained.table and "measured" not in explained.text
        assert {e["args"]["name"] for e in explained.events if e["name"] == "process_name"} == {"predicted"}


LANES = [
    Lane("forward.0", "predicted", (StepTime("COMPUTE", "matmul 0", 0.0, 5.0), StepTime("COPY", "push", 1.0, 3.0))),
    Lane("forward.0", "measured", (StepTime("COMPUTE", "matmul 0", 0.0, 8.0),)),
    Lane("forward.1", "predicted", (StepTime("COMPUTE", "matmul 0", 0.0, 2.0),)),
]


def test_sites_follow_each_other_in_a_timeline() -> None:
    spans = [(e["cat"], e["pid"], e["tid"], e["ts"], e["dur"]) for e in trace_events(LANES) if e["ph"] == "X"]
    assert spans == [
        ("forward.0", 1, 0, 0.0, 5.0), ("forward.0", 1, 1, 1.0, 2.0), ("forward.0", 2, 0, 0.0, 8.0),
        ("forward.1", 1, 0, 8.0, 2.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [("matmul 3", "matmul"), ("Matmul 0 -> PARTIAL", "matmul"), ("Copy a -> b", "copy"), ("reduce 6", "reduce"),
     ("reduce_scatter", "collective"), ("Compute 0 -> PARTIAL", "matmul"), ("wait 0", "other_step")],
)  # fmt: skip
def test_kinds_of_steps(text: str, expected: str) -> None:
    assert step_kind(text) == expected


def test_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="no timeline"):
        write_timeline(tmp_path / "empty.json", [Lane("forward.0", "measured", ())])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(OptionError, match="pip install matplotlib"):
        write_timeline(tmp_path / "step.png", LANES)
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    assert write_timeline(tmp_path / "step.png", LANES).read_bytes().startswith(b"\x89PNG")
