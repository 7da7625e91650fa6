"""Folders that processes write to for years stay small."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from ub_overlap.runtime import plan_store, stored_file
from ub_overlap.runtime.session import flight


def fill(folder: Path, names: list[str], seconds_old: float, size: int = 2) -> None:
    """Write files, the first of which is the oldest."""
    folder.mkdir(parents=True, exist_ok=True)
    changed = time.time() - seconds_old
    for i, name in enumerate(names):
        (folder / name).write_bytes(b"x" * size)
        os.utime(folder / name, (changed + i, changed + i))


def left(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_the_oldest_go_by_number_and_by_bytes(tmp_path: Path) -> None:
    names = [f"{i}.json" for i in range(10)]
    fill(tmp_path, names, 1000, size=10)
    fill(tmp_path, ["notes.txt", "9.json.bak"], 5000)
    stored_file.remove_oldest(tmp_path, re.compile(r"\d+\.json"), 7, 1000)
    assert left(tmp_path) == {*names[3:], "notes.txt", "9.json.bak"}
    stored_file.remove_oldest(tmp_path, re.compile(r"\d+\.json"), 7, 45)
    assert left(tmp_path) == {*names[6:], "notes.txt", "9.json.bak"}


def test_young_files_stay(tmp_path: Path) -> None:
    fill(tmp_path, ["0.json", "1.json"], 1000)
    fill(tmp_path, ["2.json", "3.json"], 10)
    stored_file.remove_oldest(tmp_path, re.compile(r"\d+\.json"), 0, 0, young_s=500)
    assert left(tmp_path) == {"2.json", "3.json"}


def test_a_folder_that_is_missing_is_no_error(tmp_path: Path) -> None:
    stored_file.remove_oldest(tmp_path / "none", re.compile(".*"), 0, 0)


def test_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first plan of a process removes the oldest of earlier ones, with their graphs; the user's files stay."""
    monkeypatch.setenv("UB_OVERLAP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(plan_store, "MOST_FILES", 3)
    plan_store.bound.cache_clear()
    folder = plan_store.directory()
    fill(folder, [f"{i:016x}{end}" for i in range(5) for end in (".json", ".graphs")], 1000)
    fill(folder, ["mine.json"], 5000)
    plan_store.save("f" * 16, "{}")
    kept = {f"{i:016x}" for i in (3, 4)} | {"f" * 16}
    assert {Path(name).stem for name in left(folder) if name.endswith(".json")} == kept | {"mine"}
    assert {Path(name).stem for name in left(folder) if name.endswith(".graphs")} == {f"{i:016x}" for i in (2, 3, 4)}


def test_flight_records_of_one_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that fails and restarts all day long."""
    monkeypatch.setattr(flight, "MOST_FILES", 100)
    fill(tmp_path, [f"rank0-{flight._host()}-{pid}.json" for pid in range(300)], 900)
    flight._remove_old_files(tmp_path)
    assert left(tmp_path) == {f"rank0-{flight._host()}-{pid}.json" for pid in range(200, 300)}
