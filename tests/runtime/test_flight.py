"""The flight recorder: its records, its cost, and the files after errors and SIGUSR1."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.outcomes import observe_ranks
from tests.harness.ranks import RankPool
from ub_overlap.cli import flight as merged
from ub_overlap.runtime import ops, settings, stored_file
from ub_overlap.runtime.session import flight

from . import rank_flight


def test_records(pools: dict[int, RankPool]) -> None:
    """The last 256 of 300 calls, in order, with sites, shapes, states and times, the same on both ranks."""
    rows = pools[2].run(rank_flight.records, 300)
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
    """The least of ten batches takes below 20 us a call. It takes 0.08 us on an idle machine."""
    assert ops.extension().testing.time_flight_recorder(5000, 160) < 20_000


def test_switched_off(pools: dict[int, RankPool], tmp_path: Path) -> None:
    for found in pools[2].run(rank_flight.switched_off, str(tmp_path)):
        assert found == {"records": [], "path": "", "files": []}


def test_an_error_has_a_file(pools: dict[int, RankPool], tmp_path: Path) -> None:
    """Every rank writes one. Merged, they name the rank that is behind, and the site."""
    found = pools[3].run(rank_flight.fails, str(tmp_path))
    for rank in (0, 1):
        path = found[rank]["path"]
        assert Path(path).parent == tmp_path and Path(path).name.startswith(f"rank{rank}-")
        assert f"\n  flight:   {path}" in found[rank]["text"]
        assert f"\n  flight:   {path}" in found[rank]["again"], "the error of later calls names the file of the first"
    assert [row["files"] for row in found] == [1, 1, 1]
    # The files have all groups of the processes, also those that failed in earlier tests.
    (finding,) = [f for f in merged.merge(merged.read_folder(tmp_path, print)) if f.group == found[0]["group"]]
    assert finding.ranks_at_fault == (2,)
    text = merged.text([finding])
    assert "rank 2 did not make call 4: all_gather_matmul at site '/skipped'" in text
    assert "the last call of rank 2, 3, is finished: all_gather_matmul at site '/site.2'" in text


@pytest.mark.tier("test")
def test_a_signal_in_first_calls(tmp_path: Path) -> None:
    """It neither ends the process before there is a session, nor is lost after the last group was destroyed."""
    for outcome in observe_ranks("tests.runtime.rank_flight:signalled_at_first_calls", 2, args=(str(tmp_path),)):
        assert outcome.ended and not outcome.error, outcome
        for found in outcome.value:
            assert found.get("error", "") == "" and all(found.get(key, True) for key in ("file", "ended")), outcome


@pytest.mark.tier("test")
def test_a_signal(tmp_path: Path) -> None:
    for outcome in observe_ranks("tests.runtime.rank_flight:signalled", 2, args=(str(tmp_path),)):
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


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a host whose records are in tmp_path, with one group to record."""
    monkeypatch.setattr(flight.socket, "gethostname", lambda: "node-1")
    monkeypatch.setattr(flight, "flight_record", lambda: [{"group": "tp"}])
    monkeypatch.setattr(flight._Last, "path", "")
    settings.configure(flight_dir=str(tmp_path))
    yield "node-1"
    settings.configure(flight_dir="")


def _write_files(folder: Path, names: list[str], days: float) -> None:
    now = time.time()
    for i, name in enumerate(names):
        (folder / name).write_text("{}")
        os.utime(folder / name, (now - 86400 * days + i, now - 86400 * days + i))


def test_old_files_of_this_host_are_removed(host: str, tmp_path: Path) -> None:
    """Beyond the newest 64, those older than a day. Files of other hosts and of the user stay."""
    others = ["rank0-metrics.json", "rank0-1.json", "rank3-node-2-7.json", f"rank0-{host}-7.json.txt", f"rank0-{host}-x.json"]
    _write_files(tmp_path, others, days=9)
    _write_files(tmp_path, [f"rank{i}-{host}-1.json" for i in range(-1, 69)], days=3)
    written = Path(flight.dump("a test"))
    assert written.name == f"rank-1-{host}-{os.getpid()}.json"
    removed = {f"rank{i}-{host}-1.json" for i in range(-1, 6)}  # 70 and the written one, without 64
    assert {file.name for file in tmp_path.iterdir()} == {
        *others, written.name, *(f"rank{i}-{host}-1.json" for i in range(-1, 69)),
    } - removed  # fmt: skip


def test_the_files_of_one_fault_stay(host: str, tmp_path: Path) -> None:
    """Of more ranks than the files that are kept."""
    _write_files(tmp_path, [f"rank{i}-{host}-1.json" for i in range(200)], days=0.01)
    assert flight.dump("a test")
    assert len(list(tmp_path.iterdir())) == 201


def test_files_that_another_rank_removes(host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The written file is named, although another rank removes old files at the same time."""
    _write_files(tmp_path, [f"rank{i}-{host}-1.json" for i in range(70)], days=3)
    stat = Path.stat

    def gone(file: Path, **options: bool) -> os.stat_result:
        if file.name.endswith("-1.json"):
            raise FileNotFoundError(file)
        return stat(file, **options)

    monkeypatch.setattr(Path, "stat", gone)
    path = flight.dump("a test")
    assert path and path == flight._Last.path


def test_a_folder_that_hangs(host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error does not wait for its file, nor do later ones. The folder may come back."""
    answers = threading.Event()
    written = stored_file.write

    def hangs(path: Path, data: bytes | str) -> Path:
        answers.wait(30)
        return written(path, data)

    monkeypatch.setattr(flight, "_WRITE_S", 0.2)
    monkeypatch.setattr(stored_file, "write", hangs)
    begin = time.monotonic()
    assert [flight.dump("a test"), flight.dump("another")] == ["", ""]
    assert time.monotonic() - begin < 10
    answers.set()
    monkeypatch.setattr(flight, "_WRITE_S", 20.0)
    assert Path(flight.dump("a third")).parent == tmp_path
