"""Tests of `clear-cache`: it removes files of this package in the cache folder, and nothing else."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.ranks import PATIENCE_S
from ub_overlap.cli import cache, main

OURS = (
    "plans/0011223344556677.json", "plans/0011223344556677.graphs", "plans/.ub_overlap-abc", "tuned/0011223344556677.json",
    "algorithms/nvidia-h200-130100-0123abcd.json", "algorithms/.ub_overlap-abc",
    "flight/rank0-node-1.lan-4711.json", "flight/rank-1-4712.json", "flight/.ub_overlap-abc",
)  # fmt: skip
PROFILE = "profiles/nvidia-h200-tp8-0123abcd.json"
THEIRS = (
    "plans/notes.txt", "plans/deadbeef.json.bak", "tuned/x.json", "algorithms/x.json", "thesis.json",
    "plans/.ub_overlap-new", "flight/rank0.json",
)  # fmt: skip


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a cache folder with files of ours and of the user, and links out of it."""
    root = tmp_path / "cache"
    outside = tmp_path / "outside"
    for name in (*OURS, PROFILE, *THEIRS):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x" * 100)
        os.utime(root / name, (1e9, 1e9))
    os.utime(root / "plans/.ub_overlap-new")
    outside.mkdir()
    (outside / "aabbccddeeff0011.json").write_text("precious")
    (root / "plans/aabbccddeeff0011.json").symlink_to(outside / "aabbccddeeff0011.json")
    (root / "plans/cafecafecafecafe.json").mkdir()
    monkeypatch.setenv("UB_OVERLAP_CACHE_DIR", str(root))
    return root


def names(root: Path) -> set[str]:
    return {p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file() and not p.is_symlink()}


def test_dry_run(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = names(store)
    assert main(["clear-cache", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert names(store) == before
    listed, _, stays = out.partition("stays:")
    assert all(f"100 B  {store / name}" in listed for name in OURS) and PROFILE not in out
    assert f"{store}/plans" in listed and "300 B" in listed
    assert f"{store}/plans/aabbccddeeff0011.json: a symbolic link" in stays and "notes.txt: not a file of this package" in stays
    assert ".ub_overlap-new: maybe in use" in stays and "cafecafecafecafe.json: not a file of this package" in stays


def test_only_our_files_are_removed(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clear-cache", "--yes", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["removed"], answer["bytes"], answer["failed"]) == (9, 900, []) and len(answer["skipped"]) == 8
    assert {Path(f["path"]).relative_to(store).as_posix() for f in answer["files"]} == set(OURS)
    assert names(store) == {*THEIRS, PROFILE}
    assert (tmp_path / "outside/aabbccddeeff0011.json").read_text() == "precious"
    assert (store / "plans/aabbccddeeff0011.json").is_symlink()
    assert main(["clear-cache", "--yes", "--profiles"]) == 0
    assert PROFILE not in names(store) and "removed 1 files, 100 B" in capsys.readouterr().out
    assert main(["clear-cache", "--yes"]) == 0
    assert f"nothing to remove in {store}" in capsys.readouterr().out


def test_a_folder_that_is_a_link_is_not_followed(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (store / "tuned").rename(tmp_path / "elsewhere")
    (store / "tuned").symlink_to(tmp_path / "elsewhere")
    assert main(["clear-cache", "--yes"]) == 0
    assert "tuned: a symbolic link" in capsys.readouterr().out and (tmp_path / "elsewhere/0011223344556677.json").exists()


def test_a_cache_folder_that_is_a_link(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to(store)
    monkeypatch.setenv("UB_OVERLAP_CACHE_DIR", str(tmp_path / "link"))
    assert main(["clear-cache", "--yes"]) == 2
    assert "set UB_OVERLAP_CACHE_DIR to the folder itself" in capsys.readouterr().err and set(OURS) <= names(store)


def test_a_link_that_appears_between_listing_and_removal(store: Path, tmp_path: Path) -> None:
    files, _ = cache.find_files(store, ("tuned",))
    (store / "tuned").rename(tmp_path / "elsewhere")
    (store / "tuned").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="tuned"):
        cache.remove_files(store, files)
    assert (tmp_path / "elsewhere/0011223344556677.json").exists()


def test_age(store: Path) -> None:
    os.utime(store / OURS[0])
    assert main(["clear-cache", "--yes", "--older-than", "1"]) == 0
    assert OURS[0] in names(store) and OURS[1] not in names(store)


def test_an_empty_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("UB_OVERLAP_CACHE_DIR", str(tmp_path / "none"))
    assert main(["clear-cache", "--yes"]) == 0
    assert "nothing to remove" in capsys.readouterr().out and not (tmp_path / "none").exists()


def test_without_yes_nothing_happens(store: Path) -> None:
    before = names(store)
    with pytest.raises(SystemExit) as exit:
        main(["clear-cache", "--json"])
    assert exit.value.code == 2 and names(store) == before


@pytest.mark.tier("test")
@pytest.mark.parametrize(("answer", "code"), [("n", 1), ("", 1), ("y", 0)])
def test_the_question(answer: str, code: int, store: Path) -> None:
    ours, theirs = pty.openpty()
    os.write(ours, f"{answer}\n".encode())
    command = [sys.executable, "-m", "ub_overlap", "clear-cache"]
    done = subprocess.run(command, stdin=theirs, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    os.close(theirs)
    os.close(ours)
    assert done.returncode == code and "remove 9 files? [y/N]" in done.stdout, done.stderr
    assert (OURS[0] in names(store)) is (code == 1)


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 40, "5120.0 GiB")])
def test_sizes(count: int, text: str) -> None:
    assert cache.size_text(count) == text
