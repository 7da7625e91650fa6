"""ub_overlap.explain and reports: decisions as text and JSON, and the strategies that ran."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ub_overlap
from tests.compiler.rank_compile import FORCE, FUSED, build, world_name
from tests.harness.fake_ranks import FakeRanks
from tests.harness.ranks import RankPool
from tests.harness.traces import as_loss
from tests.models.compare import uncached
from ub_overlap.runtime import plan_store

MEGATRON = "tests.models.megatron"


@dataclass(frozen=True)
class Told:
    """Contents of a report, and whether explaining left the model unchanged."""

    rows: list[dict[str, Any]]
    json: str
    table: str
    text: str
    stored: list[bool]
    untouched: bool


def explain(rank: int, world: int, variant: dict[str, Any], options: dict[str, Any], compiled: bool) -> Told:
    case = build(rank, world, MEGATRON, variant)
    tensors = [*case.inputs, *case.module.parameters()]
    for t in tensors:
        t.grad = torch.full_like(t, 3.0)
    module = torch.compile(case.module, backend="ub_overlap", options=options) if compiled else case.module
    with uncached():
        report = ub_overlap.explain(module, options)(*case.inputs)
    untouched = all(t.grad is not None and torch.equal(t.grad, torch.full_like(t, 3.0)) for t in tensors)
    rows = [d.to_dict() for d in report.decisions]
    stored = [path.is_file() for path in report.paths]
    return Told(rows, report.to_json(), report.table(), str(report), stored, untouched)


def check_fields(told: Told) -> None:
    kinds = [(r["phase"], r["kind"]) for r in told.rows]
    assert kinds == [(p, k) for p in ("forward", "backward") for k in ("all_gather_matmul", "matmul_reduce_scatter")]
    assert [r["id"] for r in told.rows] == ["forward.0", "forward.1", "backward.0", "backward.1"]
    gather = told.rows[0]
    assert (gather["strategy"], gather["reason"], gather["dtype"]) == ("pipelined", None, "float32")
    assert (gather["group"], gather["ranks"], gather["bytes"]) == ("g0", 2, 8 * 64 * 4)
    assert gather["shapes"] == {
        "input": "[8, 64]",
        "gathered": "[16, 64]",
        "matmul0": "[16, 64] @ [64, 48]",
        "matmul1": "[16, 64] @ [64, 48]",
    }
    assert gather["flops"] == 2 * 2 * 16 * 64 * 48
    assert gather["module"] in ("w1", "w3")
    for row in told.rows:
        file, line, code = row["source"].split(":", 2)
        assert Path(file).name == "megatron.py" and int(line) > 0 and "self." in code
        assert (row["calls"], row["executed"]) == (1, "pipelined")
        assert row["transport"] not in (None, "", "c10d")
        assert row["bytes_copied"] > 0
        assert 0 <= row["bytes_overlapped"] <= row["bytes_copied"]


def test_decisions(pool2: RankPool) -> None:
    for compiled in (False, True):
        for told in pool2.run(explain, {"gated": True, "dims": 2}, FORCE, compiled):
            check_fields(told)
            assert told.untouched
            assert told.stored == [True, True]
            parsed = json.loads(told.json)
            assert parsed["sites"] == told.rows
            assert parsed["plans"] == list(dict.fromkeys(r["plan"] for r in told.rows))


def test_text(pool2: RankPool) -> None:
    for told in pool2.run(explain, {"gated": True, "dims": 2}, {**FORCE, "overrides": {"forward.1": "none"}}, False):
        lines = told.table.splitlines()
        assert [line.split()[0] for line in lines[2:]] == ["forward.0", "forward.1", "backward.0", "backward.1"]
        assert "disabled_by_user" in lines[3]
        assert "[16, 64] @ [64, 48]" in lines[2] and "g0 x2" in lines[2]
        assert "1 of 2 collectives overlapped" in told.text
        assert "left alone: disabled_by_user 1" in told.text
        assert told.rows[1]["calls"] is None and told.rows[1]["executed"] is None


def no_collectives(rank: int, world: int) -> tuple[str, int]:
    report = ub_overlap.explain(torch.nn.Linear(4, 4), FORCE)(torch.ones(2, 4))
    return report.summary(), len(report.decisions)


@pytest.mark.tier("test")
def test_nothing_to_say(fake2: FakeRanks) -> None:
    assert fake2.run(no_collectives) == [("no graph with collectives was compiled", 0)]


class Granularity(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append((record.levelname, record.getMessage()))


def logged(rank: int, world: int) -> list[tuple[str, str]]:
    """Return the backend's log records from compiling one form."""
    log, lines = logging.getLogger("ub_overlap"), Granularity()
    level = log.level
    log.addHandler(lines)
    log.setLevel(logging.DEBUG)
    try:
        case = build(rank, world, "tests.models.forms", {"name": "relu_scatter"})
        with uncached():
            as_loss(torch.compile(case.module, backend="ub_overlap", options=FUSED)(*case.inputs)).backward()
    finally:
        log.removeHandler(lines)
        log.setLevel(level)
    return lines.records


def test_log(pool2: RankPool) -> None:
    """The log has one line per graph at INFO, and every decision with its reason at DEBUG."""
    for records in pool2.run(logged):
        info = [text for level, text in records if level == "INFO" and "collectives overlapped" in text]
        assert [text.split()[0] for text in info] == ["forward", "backward"]
        assert "0 of 1 collectives overlapped; left alone: non_linear 1" in info[0]
        debug = [text for level, text in records if level == "DEBUG" and text.startswith("forward.0")]
        assert len(debug) == 1 and "non_linear: relu" in debug[0] and "forms.py" in debug[0]


def ran(rank: int, world: int) -> tuple[list[tuple[str, int | None]], list[str], list[bool]]:
    """Run three steps of a new model in a process that compiled others before.

    Return calls by site of the new model, digests of the earlier plans, and whether each plan is stored.
    """
    case = build(rank, world, MEGATRON, {"dims": 2, "bias": True, "local": 12})
    with uncached():
        function = torch.compile(case.module, backend="ub_overlap", options=FORCE)
        before = {p.digest for p in ub_overlap.reports().plans}
        for _ in range(3):
            as_loss(function(*case.inputs)).backward()
    report = ub_overlap.reports()
    mine = [d for d in report.decisions if d.plan not in before]
    return [(d.id, d.calls) for d in mine], sorted(before), [plan_store.path_of(d.plan).is_file() for d in mine]


def test_reports(pool2: RankPool) -> None:
    pool2.run(explain, {"gated": True, "dims": 2}, FORCE, False)
    for calls, before, stored in pool2.run(ran):
        assert calls == [("forward.0", 3), ("forward.1", 3), ("backward.0", 3), ("backward.1", 3)]
        assert before and all(stored)


def plain_function(rank: int, world: int) -> list[str]:
    """Explain a plain function without gradients, and return its strategies."""
    import torch.distributed._functional_collectives as funcol

    group = world_name()

    def function(x: Tensor, w: Tensor) -> Tensor:
        return funcol.all_gather_tensor(x, 0, group) @ w

    with uncached():
        return [str(d.strategy) for d in ub_overlap.explain(function, FORCE)(torch.ones(4, 8), torch.ones(8, 4)).decisions]


@pytest.mark.tier("test")
def test_plain_function(fake2: FakeRanks) -> None:
    assert fake2.run(plain_function) == [["pipelined"]]
