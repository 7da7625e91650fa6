"""Collectives with independent matmuls: matched by dependency, run as one op."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from tests.compiler.rank_compile import build, check
from tests.harness.ranks import RankPool
from tests.harness.tiers import INNER
from tests.harness.traces import as_loss, capture
from tests.models.compare import uncached
from ub_overlap.compiler.match import find_candidates
from ub_overlap.compiler.reports.history import HISTORY

LLAMA: tuple[str, dict[str, Any]] = ("tests.models.dtensor_llama", {})
MLP: tuple[str, dict[str, Any]] = ("tests.models.megatron", {"dims": 2, "gated": True})
BULK: dict[str, Any] = {"overlap": "force", "overrides": {"backward.*": "bulk"}}


def independent(rank: int, world: int, stage: str) -> dict[str, list[tuple[str, int]]]:
    """Return by phase (collective, number of matmuls independent of it) in graph order."""
    return {
        trace.phase: [
            (c.collective.op.value if c.collective.op else "", len(c.independent_matmuls))
            for c in find_candidates(trace.module.graph)
        ]
        for trace in capture(build(rank, world, *LLAMA), stage)
    }


@pytest.mark.tier("full")
@pytest.mark.parametrize("stage", ["aot", "inductor"])
def test_independent_products_of_a_llama_block(pool2: RankPool, stage: str) -> None:
    """Each collective reports the matmuls that are independent of it.

    Forward: none. Backward: the weight gradients that are ready (w2 w1 w3; then also wo v k q).
    """
    for found in pool2.run(independent, stage):
        assert [n for _, n in found["forward"]] == [0, 0, 0, 0]
        assert found["backward"] == [("all_gather", 0), ("reduce_scatter", 3), ("all_gather", 3), ("reduce_scatter", 7)]


@pytest.mark.parametrize("inner", INNER)
def test_forced_bulk(pool2: RankPool, inner: str) -> None:
    for outcome in pool2.run(forced, inner):
        outcome.check()
        backward = [d for d in outcome.decisions if d["phase"] == "backward"]
        assert [d["strategy"] for d in backward] == ["none", "bulk", "bulk", "bulk"]
        assert [d["reason"] for d in backward] == ["strategy_illegal", None, None, None]
        assert all(len(d["paired"]) == len(d["matmuls"]) > 0 for d in backward if d["strategy"] == "bulk")
        taken = [m for d in backward for m in d["matmuls"] if d["strategy"] == "bulk"]
        assert len(taken) == len(set(taken))


def forced(rank: int, world: int, inner: str) -> Any:
    from tests.models.compare import compare

    return compare(rank, world, *LLAMA, {**BULK, "inner": inner})


@pytest.mark.parametrize("chunks", [1, 4])
def test_forced_bulk_chunks(pool2: RankPool, chunks: int) -> None:
    options = {"overlap": "force", "inner": "aot_eager", "overrides": {"backward.1": f"bulk:chunks={chunks}"}}
    for outcome in pool2.run(compare_name, *MLP, options):
        outcome.check()
        assert [d["strategy"] for d in outcome.decisions if d["id"] == "backward.1"] == [f"bulk:chunks={chunks}"]


compare_name = "tests.models.compare:compare"


def code(rank: int, world: int) -> tuple[list[str], int]:
    """Return (Inductor's generated code, number of bulk decisions) of forward and backward."""
    case = build(rank, world, *MLP)
    compiled = torch.compile(case.module, backend="ub_overlap", options=BULK)

    def step() -> None:
        as_loss(compiled(*case.inputs)).backward()

    mark = HISTORY.mark()
    with uncached():
        _, written = run_and_get_code(step)
    return written, sum(str(d.strategy) == "bulk" for p in HISTORY.since(mark) for d in p.decisions)


def test_generated_code(pool2: RankPool) -> None:
    """One call takes the collective's input and the matmul operands, and none of them is deleted before."""
    for written, decided in pool2.run(code):
        lines = [line.strip() for text in written for line in text.splitlines()]
        calls = [i for i, line in enumerate(lines) if "ub_overlap.bulk.default(" in line]
        assert len(calls) == decided == 1
        arguments = re.search(r"bulk\.default\((\w+), \[(.*?)\], \[(.*?)\], 'reduce_scatter'", lines[calls[0]])
        assert arguments, lines[calls[0]]
        for operands in arguments.groups()[1:]:
            assert operands
        names = set(re.findall(r"\b(?:buf|primals_|tangents_|arg)\w*", " ".join(arguments.groups())))
        assert len(names) >= 3
        start = max(i for i in range(calls[0]) if lines[i].startswith("def call("))
        gone = {name for line in lines[start : calls[0]] for name in re.findall(r"\bdel (\w+)", line)}
        assert not names & gone
        assert not any("_c10d_functional.reduce_scatter" in line and "=" in line for line in lines[start:])


def test_pipelined_first(pool2: RankPool) -> None:
    """Pipelined is preferred to bulk without overrides, if every collective matches."""
    for outcome in check(pool2, *MLP, {"overlap": "force", "inner": "aot_eager"}):
        assert {d["strategy"] for d in outcome.decisions} == {"pipelined"}
