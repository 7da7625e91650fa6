"""The flight recorder: its records, its cost, and the files after errors and SIGUSR1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness.ranks import RankPool
from ub_overlap.cli import flight as merged
from ub_overlap.runtime import ops

from . import rank_flight
from .spawn import run_ranks


def test_records(pools: dict[int, RankPool]) -> None:
    """The last 256 of 300 calls, in order, with sites, shapes, states and times, the same on both ranks."""
    rows = pools[2].run(rank_flight.records, 300, timeout=90)
    for rank, row in enumerate(rows):
        assert (row["rank"], row["ranks"], row["calls"], row["waiting_for"]) == (rank, 2, 300, [])
        assert row["transport"] == "shared memory" and row["device"] == "cpu"
        records = row["records"]
        assert [record["number"] for record in records] == list(range(45, 301))
        for record in records:
            number = record["number"] - 1
            assert (record["op"], record["site"]) == ("all_gather_matmul", f"/site.{number % 2}")
            assert record["strategy"] == ("none" if number % 10 == 9 else "pipelined")
            assert f"[{4 + number % 2}, 4] float" in record["shapes"]
            assert record["state"] == "finished"
            assert 0 < record["enqueued_s"] <= record["started_s"] <= record["ended_s"]
        own = [record["epoch"] for record in records if record["strategy"] != "none"]
        assert own == list(range(own[0], own[0] + len(own)))
    assert rows[0]["id"] == rows[1]["id"] != ""


def test_recording_is_cheap() -> None:
    """A call costs less than a microsecond of host time: the least of ten batches, as other processes run too."""
    assert ops.extension().testing.time_flight_recorder(5000, 160) < 1000


def test_switched_off(pools: dict[int, RankPool], tmp_path: Path) -> None:
    for found in pools[2].run(rank_flight.switched_off, str(tmp_path), timeout=60):
        assert found == {"records": [], "path": "", "files": []}


def test_an_error_has_a_file(pools: dict[int, RankPool], tmp_path: Path) -> None:
    """Every rank writes one. Merged, they name the rank that is behind, and the site."""
    found = pools[3].run(rank_flight.fails, str(tmp_path), timeout=90)
    for rank in (0, 1):
        path = found[rank]["path"]
        assert Path(path).parent == tmp_path and Path(path).name.startswith(f"rank{rank}-")
        assert f"\n  flight:   {path}" in found[rank]["text"]
        assert f"\n  flight:   {path}" in found[rank]["again"], "the error of later calls names the file of the first"
    assert [row["files"] for row in found] == [1, 1, 1]
    (finding,) = [f for f in merged.merge(merged.read_folder(tmp_path)) if f.ranks_at_fault]
    assert finding.ranks_at_fault == (2,)
    text = merged.text([finding])
    assert "rank 2 did not make call 4: all_gather_matmul at site '/skipped'" in text
    assert "the last call of rank 2, 3, is finished: all_gather_matmul at site '/site.2'" in text


@pytest.mark.timeout(120)
def test_a_signal(tmp_path: Path) -> None:
    for outcome in run_ranks("tests.runtime.rank_flight:signalled", 2, args=(str(tmp_path),), timeout=90):
        found = outcome.value
        assert found["error"] == "", found
        assert found["child"] == -10, "SIGUSR1 ends a forked child"
        assert found["taken"] is False
    (file,) = tmp_path.glob("rank0-*.json")
    content = json.loads(file.read_text())
    assert (content["reason"], content["rank"], len(list(tmp_path.iterdir()))) == ("SIGUSR1", 0, 1)
    (group,) = content["groups"]
    assert [record["state"] for record in group["records"]] == ["finished", "started"]
    assert group["waiting_for"] == [1]
