"""`doctor --flight`: the merged flight records of all ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ub_overlap.cli import main


def _record(number: int, site: str, state: str = "finished") -> dict[str, Any]:
    row = {"number": number, "epoch": number, "state": state, "op": "bulk all_gather", "site": site, "strategy": "bulk"}
    return {**row, "shapes": "input[4, 4] float; ", "enqueued_s": 1, "started_s": 2, "ended_s": 3}


def _write(
    folder: Path,
    rank: int,
    sites: Sequence[str],
    *,
    ranks: int = 3,
    state: str = "finished",
    waiting: Sequence[int] = (),
    members: Sequence[int] = (),
    time: float = 1.0,
) -> None:
    records = [_record(i + 1, site, state if i + 1 == len(sites) else "finished") for i, site in enumerate(sites)]
    group = {"group": "tp", "id": "abc", "device": "cpu", "rank": rank, "ranks": ranks, "transport": "shared memory"}
    group |= {"calls": len(sites), "waiting_for": list(waiting), "members": list(members), "records": records}
    content = {"version": 1, "rank": rank, "pid": 7, "host": "h", "time": time, "reason": "SIGUSR1", "groups": [group]}
    (folder / f"rank{rank}-h-{int(time)}.json").write_text(json.dumps(content))


def _merge(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any], str]:
    code = main(["doctor", "--flight", str(folder), "--json"])
    (finding,) = json.loads(capsys.readouterr().out)
    assert main(["doctor", "--flight", str(folder)]) == code
    return code, finding, capsys.readouterr().out


def test_a_rank_that_is_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 2):
        _write(tmp_path, rank, ["a/0", "a/1", "a/2"], state="started", waiting=[1])
    _write(tmp_path, 1, ["a/0"])
    code, finding, text = _merge(tmp_path, capsys)
    assert (code, finding["ranks_at_fault"]) == (1, [1])
    assert "rank 1 did not make call 2: bulk all_gather at site 'a/1' (input[4, 4] float)" in text
    assert "the last call of rank 1, 1, is finished: bulk all_gather at site 'a/0'" in text
    assert "rank 0: 3 calls, the last started, waits for rank 1  (rank0-h-1.json)" in text


def test_a_part_of_a_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks are those of the group that the user named: a part without its first rank misses none."""
    for rank in (1, 3):
        _write(tmp_path, rank, ["a/0"], ranks=2, members=(1, 3))
    assert _merge(tmp_path, capsys)[1]["ranks_at_fault"] == []
    (tmp_path / "rank3-h-1.json").unlink()
    _, finding, text = _merge(tmp_path, capsys)
    assert finding["ranks_at_fault"] == [3] and "rank 3 left no record" in text


def test_ranks_that_disagree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 2):
        _write(tmp_path, rank, ["a/0", "a/1"], state="failed")
    _write(tmp_path, 1, ["a/0", "b/7"], state="failed")
    code, finding, text = _merge(tmp_path, capsys)
    assert (code, finding["ranks_at_fault"]) == (1, [1])
    assert "the ranks disagree at call 2:" in text and "  rank 1: bulk all_gather at site 'b/7'" in text
    assert "  ranks 0, 2: bulk all_gather at site 'a/1'" in text


def test_two_ranks_that_disagree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither of two is in the majority: both are named."""
    _write(tmp_path, 0, ["a/0"], ranks=2)
    _write(tmp_path, 1, ["a/1"], ranks=2)
    assert _merge(tmp_path, capsys)[1]["ranks_at_fault"] == [0, 1]


def test_a_rank_without_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(tmp_path, 0, ["a/0"], state="started", waiting=[2])
    _write(tmp_path, 1, ["a/0"], state="started", waiting=[2])
    code, finding, text = _merge(tmp_path, capsys)
    assert (code, finding["ranks_at_fault"]) == (1, [2])
    assert "rank 2 left no record" in text


def test_a_busy_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All are in one call: the rank that waits for no rank delays it, directly or not."""
    _write(tmp_path, 0, ["a/0"], state="started", waiting=[1])
    _write(tmp_path, 1, ["a/0"], state="started", waiting=[2])
    _write(tmp_path, 2, ["a/0"], state="started")
    code, finding, _ = _merge(tmp_path, capsys)
    assert (code, finding["ranks_at_fault"]) == (1, [2])


def test_nothing_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of several files of one rank the newest counts."""
    _write(tmp_path, 0, ["x/0"], ranks=2, time=1.0)
    for rank in (0, 1):
        _write(tmp_path, rank, ["a/0", "a/1"], ranks=2, time=2.0)
    code, finding, text = _merge(tmp_path, capsys)
    assert (code, finding["ranks_at_fault"]) == (0, [])
    assert "all ranks finished their 2 calls" in text


def test_other_files_are_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(tmp_path, 0, ["a/0"], ranks=2)
    _write(tmp_path, 1, ["a/0"], ranks=2)
    (tmp_path / "rank0.json").write_text('{"loss": 2.0}')
    assert _merge(tmp_path, capsys)[0] == 0


@pytest.mark.parametrize("content", ["{}", "[1]", '{"version": 1, "groups": [{"id": 3}]}', "no json"])
def test_a_bad_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    (tmp_path / "rank0-h-1.json").write_text(content)
    assert main(["doctor", "--flight", str(tmp_path)]) == 2
    assert "flight record" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{}", '{"version": 1, "groups": [{"id": 3}]}', '{"version": 1, "gro'])
def test_a_bad_file_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    for rank in (0, 1):
        _write(tmp_path, rank, ["a/0"], ranks=2)
    (tmp_path / "rank7-7.json").write_text(content)
    assert main(["doctor", "--flight", str(tmp_path)]) == 0
    out, said = capsys.readouterr()
    assert "all ranks finished their 1 calls" in out
    assert said.startswith(f"skipped {tmp_path}/rank7-7.json: ") and len(said.splitlines()) == 1
    for rank in (0, 1):
        (tmp_path / f"rank{rank}-h-1.json").write_text(content)
    assert main(["doctor", "--flight", str(tmp_path)]) == 2, "no good file"
    said = capsys.readouterr().err
    assert said.count("skipped ") == 3 and "no flight records" in said


def test_a_record_with_odd_types(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(tmp_path, 0, ["a/0"], ranks=2)
    _write(tmp_path, 1, ["a/0"], ranks=2)
    odd = json.loads((tmp_path / "rank1-h-1.json").read_text())
    odd["time"] = "yesterday"
    (tmp_path / "rank2-1.json").write_text(json.dumps(odd))
    assert main(["doctor", "--flight", str(tmp_path)]) == 0
    assert "skipped" in capsys.readouterr().err


def test_a_bad_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--flight", str(tmp_path)]) == 2
    assert "no flight records" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--flight", str(tmp_path / "none")])
    assert "folder not found" in capsys.readouterr().err
