"""Damaged, truncated and hostile files: one line that names the file, and nothing else is lost."""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.compiler.test_plan import PLAN
from tests.diff.samples import graphs, report
from tests.harness.ranks import PATIENCE_S
from ub_overlap import __main__ as cli
from ub_overlap.compiler.cost import profile_lookup
from ub_overlap.compiler.cost.profile import Profile
from ub_overlap.compiler.diff import stored_report
from ub_overlap.compiler.diff.graph_store import PlanGraphs
from ub_overlap.compiler.overrides.override_set import parse_overrides
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.reports.history import History
from ub_overlap.runtime import autotune, machine, plan_store, profile_store, stored_file
from ub_overlap.runtime.errors import OptionError, StoredFileError
from ub_overlap.tools import trace_events

SECONDS = float(os.environ.get("FUZZ_SECONDS", "0.3"))
"""Of each mutation test."""


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of an own plan store that has PLAN."""
    monkeypatch.setenv("UB_OVERLAP_CACHE_DIR", str(tmp_path))
    plan_store.save(PLAN.digest, PLAN.to_json())
    return plan_store.directory()


def run(*words: str | Path) -> int:
    try:
        return cli.main([str(word) for word in words])
    except SystemExit as exit:
        return int(exit.code or 0)


BAD = {
    "empty": "", "cut": '{"version": 1, "dig', "other": "[1, 2]", "binary": "\x00\x01", "deep": "[" * 100_000,
    "field": PLAN.to_json().replace('"ranks": 2', '"ranks": "two"'), "kind": PLAN.to_json().replace("all_gather", "all_father"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_plan_hides_no_other(name: str, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`report list`, `report show`, bisect's list and reports() skip a bad file with one line that names it."""
    digest = "ab" * 8
    (store / f"{digest}.json").write_text(BAD[name])
    assert run("report", "list", "--json") == 0
    out, err = capsys.readouterr()
    assert [row["digest"] for row in json.loads(out)] == [PLAN.digest]
    assert err.count("\n") == 1 and err.startswith("skipped") and f"{digest}.json" in err
    assert run("report", "show", PLAN.digest[:6]) == 0
    assert capsys.readouterr().err == ""
    assert run("report", "show", digest) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and f"{digest}.json" in err and "Traceback" not in err and not out
    history = History()
    assert [p.digest for p in history.find_all([digest, PLAN.digest])] == [PLAN.digest]
    assert cli.main(["explain", str(store / f"{PLAN.digest}.json")]) == 0


def test_a_fifo_is_skipped(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To open a FIFO waits for its writer: no reader of the cache folder does."""
    digest = "ab" * 8
    fifos = [store / f"{digest}.json", store / f"{digest}.graphs", store.parent / "profiles/p.json", autotune.path_of(digest)]
    for path in fifos:
        path.parent.mkdir(exist_ok=True)
        os.mkfifo(path)
    assert run("report", "list", "--json") == 0
    out, err = capsys.readouterr()
    assert [row["digest"] for row in json.loads(out)] == [PLAN.digest] and f"{digest}.json" in err
    assert run("report", "show", digest) == 2
    assert plan_store.load(digest) is None and plan_store.load_graphs(digest) is None
    assert profile_store.find_profiles(machine.key("cpu", 2)) == ([], []) and autotune._load(fifos[-1]) == {}


def test_a_plan_under_another_digest(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file whose content was changed, or that was renamed, is not the plan of its name."""
    plan_store.save("cd" * 8, PLAN.to_json())
    assert History().find("cd" * 8) is None
    assert "does not have its digest" in caplog.text and caplog.text.count("\n") == 1


@pytest.mark.parametrize("verb", [["explain"], ["diff", "GOOD"]])
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "the file is empty"),
        (json.dumps(report())[:3000], "the file is truncated"),
        ("hello", "the file is damaged: not JSON"),
        ("[" * 100_000, "nested too deep"),
        ("[" * 80 + "]" * 80, "nested too deep"),
        ('{"version": 1, "plans": [], "sites": [' + "9" * 30 + "]}", "a number of 30 digits"),
        ('{"version": 3, "plans": [], "sites": []}', "field version; where: FILE; got: 3; expected: 1"),
        ('{"version": 1, "sites": []}', "required field plans"),
        ('{"version": 1, "plans": [], "sites": [{"id": 5}]}', "not a report: field sites[0].id; where: FILE; got: 5"),
        ('{"block": {}, "sites": [], "version": 1}', "a prediction of plan --json"),
        ('{"format": "ub_overlap profile", "compute": {}}', "a device profile; where: FILE; "),
        ('{"traceEvents": []}', "exposed FILE"),
        ('[{"module": "a", "strategy": "none"}]', "plan --overrides FILE"),
    ],
)
def test_what_is_no_report(
    verb: list[str], content: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that names file and field, exit code 2."""
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(report()))
    bad.write_text(content)
    assert run(*[good if word == "GOOD" else word for word in verb], bad) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and expected in err.replace(str(bad), "FILE"), err


def test_missing_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["explain", "nofile.json"], ["plan", "--model", "llama-8b", "--tp", "2", "--overrides", "nofile.yaml"]):
        assert run(*words) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and "file not found" in err and words[-1] in err and "Errno" not in err
    assert run("explain", tmp_path) == 2
    assert "Is a directory" in capsys.readouterr().err


def test_a_saved_plan_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file of `plan --save` has sites and no graphs."""
    saved = tmp_path / "plan.json"
    saved.write_text(json.dumps({"version": 1, "plans": [PLAN.digest], "sites": [d.to_dict() for d in PLAN.decisions]}))
    assert run("explain", saved, "--html", tmp_path / "page.html") == 0
    out = capsys.readouterr().out
    assert all(d.id in out for d in PLAN.decisions)
    assert run("explain", saved, "--site", PLAN.decisions[0].id, "--json") == 0
    assert [s["id"] for s in json.loads(capsys.readouterr().out)["sites"]] == [PLAN.decisions[0].id]
    assert run("diff", saved, saved) == 0


def test_truncated_graphs(store: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """The sites are shown without the graphs, and one line names the file."""
    path = plan_store.save_graphs(PLAN.digest, graphs().pack()[:-20])
    assert run("explain", store / f"{PLAN.digest}.json") == 0
    assert PLAN.decisions[0].id in capsys.readouterr().out
    assert caplog.messages == [f"skipped {path}: the file is truncated, got {path.stat().st_size} bytes of compressed data"]


def test_a_read_report_is_the_written_one(tmp_path: Path) -> None:
    """Reading loses no field of a plan or of a report: a new field of a Decision is in compiler/plan/records.py too."""
    path = tmp_path / "a.json"
    for content in (report(), json.loads(PLAN.to_json())):
        path.write_text(json.dumps(content))
        found = stored_report.read_report(path)
        if "digest" not in content:
            assert json.loads(json.dumps({k: found[k] for k in content})) == json.loads(json.dumps(content))
        else:
            assert [{k: v for k, v in s.items() if k != "plan"} for s in found["sites"]] == content["sites"]


HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31m\u202egnp.exe\ud800"


def test_terminal_codes(store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Control characters of a stored text are shown as escapes, in every form that JSON has for them."""
    monkeypatch.setenv("COLUMNS", "400")
    plan = json.loads(PLAN.to_json())
    plan["sites"][0]["module"] = plan["sites"][0]["shapes"]["input"] = f"a{HOSTILE}\U0001f600\\u001b"
    for text in (json.dumps(plan), json.dumps(plan, ensure_ascii=False).replace("\ud800", "\\ud800")):
        (store / f"{PLAN.digest}.json").write_text(text)
        for words in (["report", "show", PLAN.digest], ["report", "show", PLAN.digest, "--json"]):
            assert run(*words) == 0
            shown = "".join(capsys.readouterr())
            assert not set(shown) & set(HOSTILE[:1] + "\x07\x9b\u202e\ud800")
            assert "\\u001b" in shown
    (module,) = {s["module"] for s in stored_report.read_report(store / f"{PLAN.digest}.json")["sites"]} - {
        d.module for d in PLAN.decisions
    }
    assert module.endswith("\U0001f600\\u001b") and "\\u202egnp.exe\\ud800" in module


def test_writes_are_atomic_and_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The content reaches the disk before the name; a failed write leaves the old file and no other."""
    path, order = tmp_path / "a" / "file.json", []
    replace, fsync = os.replace, os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append(f"fsync {os.fstat(fd).st_size}"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append("replace"), replace(a, b)))
    stored_file.write(path, "old text")
    assert order == ["fsync 8", "replace"]

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        stored_file.write(path, "new text")
    assert path.read_text() == "old text" and os.listdir(path.parent) == ["file.json"]


def test_one_writer() -> None:
    """No other file of the engine renames files into place."""
    root = Path(__file__).parents[2]
    folders = [root / name for name in ("compiler", "runtime", "tools")]
    writers = [p.name for f in folders for p in f.rglob("*.py") if "os.replace" in p.read_text() or "mkstemp" in p.read_text()]
    assert writers == ["stored_file.py"]


BOMBS = {
    "aliases": "a: &a [x, x, x, x, x, x, x, x, x]\n"
    + "".join(f"{c}: &{c} [{', '.join(['*' + chr(ord(c) - 1)] * 9)}]\n" for c in "bcdefghij"),
    "merges": "a: &a {x: 1}\n" + "".join(f"{c}: &{c} {{<<: [{', '.join(['*' + chr(ord(c) - 1)] * 9)}]}}\n" for c in "bcdefghi"),
    "itself": "&a [*a]",
    "deep": "[" * 5000,
    "long": "- {module: a, strategy: none}\n" * 100_000,
}


@pytest.mark.parametrize("name", BOMBS)
def test_yaml_bombs(name: str, tmp_path: Path) -> None:
    """A file of rules that expands without end is refused at once."""
    pytest.importorskip("yaml")
    path = tmp_path / "rules.yaml"
    path.write_text(BOMBS[name])
    begin = time.monotonic()
    with pytest.raises(OptionError) as caught:
        parse_overrides(str(path))
    assert time.monotonic() - begin < 5 and len(str(caught.value)) < 2000 and "rules.yaml" in str(caught.value)


def test_yaml_anchors(tmp_path: Path) -> None:
    """A few aliases are fine."""
    pytest.importorskip("yaml")
    path = tmp_path / "rules.yaml"
    path.write_text("- &a {module: '*.wq', strategy: none}\n- {<<: *a, phase: backward}\n")
    assert [r.phase for r in parse_overrides(str(path)).rules] == ["", "backward"]


VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    10**17,
    1e308,
    float("nan"),
    "",
    "x" * 300,
    "\x1b[2J",
    "../../etc",
    [],
    [[]],
    {},
    {"a": 1},
]


def mutate(random_: random.Random, value: Any) -> Any:
    """Return `value` with one part replaced, removed, repeated or renamed."""
    if isinstance(value, dict) and value and random_.random() < 0.95:
        key = random_.choice(list(value))
        if random_.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if random_.random() < 0.1:
            return {(str(random_.choice(VALUES)) if k == key else k): v for k, v in value.items()}
        return {**value, key: mutate(random_, value[key])}
    if isinstance(value, list) and value and random_.random() < 0.95:
        place = random_.randrange(len(value))
        if random_.random() < 0.1:
            return value[:place] + value[place + 1 :]
        if random_.random() < 0.1:
            return [*value, value[place]]
        return [*value[:place], mutate(random_, value[place]), *value[place + 1 :]]
    if isinstance(value, int) and not isinstance(value, bool) and random_.random() < 0.5:
        return value + random_.choice((-1, 1, 7))
    return random_.choice(VALUES)


def damage(random_: random.Random, data: bytes) -> bytes:
    """Return bytes that were cut, or changed at one place."""
    place = random_.randrange(len(data))
    if random_.random() < 0.3:
        return data[:place]
    return data[:place] + bytes([random_.randrange(256)]) + data[place + random_.randrange(3) :]


def read_report(path: Path) -> None:
    """Read and show a report, as `explain` does in all its forms, and compare it."""
    words = [["--html", "page.html"], ["--dot", "x.dot", "--text"], ["--model-explorer", "x.json", "--json"], []]
    for extra in words:
        code = run("explain", path, *[path.parent / w if "." in w else w for w in extra])
        assert code in (0, 2), code
    assert run("diff", path, path.parent / "good.json") in (0, 1, 2)


def read_graphs(path: Path) -> None:
    PlanGraphs.unpack(path.read_bytes(), str(path)).diff()


def read_tuned(path: Path) -> None:
    autotune._load(path)  # never raises: a bad file is measured again


def read_rules(path: Path) -> None:
    parse_overrides(str(path))


READERS: dict[str, tuple[Any, Callable[[Path], Any]]] = {
    "report": (report(), read_report),
    "plan": (json.loads(PLAN.to_json()), lambda path: Plan.from_json(path.read_text(errors="replace"), str(path))),
    "stored plan": (json.loads(PLAN.to_json()), read_report),
    "graphs": (graphs().to_dict(), read_graphs),
    "profile": (
        json.loads((profile_lookup.FOLDER / "cpu.json").read_text()),
        lambda path: Profile.from_json(path.read_bytes(), str(path)),
    ),
    "tuned": ({"version": 1, "tuned": {"a": {"strategy": "none", "us": {"none": 1.0}}}}, read_tuned),
    "saved plan": ({"version": 1, "plans": [], "sites": [d.to_dict() for d in PLAN.decisions]}, read_rules),
    "rules": (
        [{"module": ["*.wq"], "kind": "matmul_*", "phase": "forward", "strategy": "none", "optional": True}, {"f.*": "bulk"}],
        read_rules,
    ),
    "cfg": ({"qkv_fprop": {"method": "ring_exchange", "aggregate": True}, "fc1_dgrad": {"method": "bulk"}}, read_rules),
}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[" * 100_000, b'{"traceEvents": 3}', gzip.compress(b'{"traceEvents": []}', mtime=0)[:-12],
        b'[{"ph": "X", "cat": "kernel", "name": "k", "ts": "late", "dur": [], "args": {"device": 0}}]',
        b'[{"ph": "X", "cat": "kernel", "args": 3}]', gzip.compress(bytes(3 << 20), mtime=0),
    ],
)  # fmt: skip
def test_what_is_no_trace(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_events, "MAX_BYTES", 2 << 20)
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    assert run("exposed", path) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "trace.json" in err


def check_error(error: OptionError) -> None:
    assert "file.json" in str(error) and "Traceback" not in str(error), error
    if isinstance(error, StoredFileError):
        assert "\n" not in error.line and len(error.line) < 1000


@pytest.mark.tier("test")
@pytest.mark.parametrize("kind", READERS)
@pytest.mark.filterwarnings("ignore:ub_overlap")
def test_mutated_files(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever a file has, reading it works or is an error of this package that names the file."""
    content, read = READERS[kind]
    random_, begin, tries, refused = random.Random(f"{kind} 1"), time.monotonic(), 0, 0
    path = tmp_path / "file.json"
    (tmp_path / "good.json").write_text(json.dumps(report()))
    while time.monotonic() - begin < SECONDS or tries < 20:
        tries += 1
        value = content
        for _ in range(random_.randrange(1, 3)):
            value = mutate(random_, value)
        data = json.dumps(value).encode()
        data = zlib.compress(data) if kind == "graphs" else data
        path.write_bytes(damage(random_, data) if random_.random() < 0.3 else data)
        try:
            read(path)
        except OptionError as error:
            refused += 1
            check_error(error)
        except Exception as error:
            raise AssertionError(f"try {tries}: {type(error).__name__}: {error}\n{path.read_bytes()[:2000]!r}") from error
    out = capsys.readouterr()
    assert "Traceback" not in out.err and "\x1b" not in out.out.replace("\x1b[0m", "")
    assert refused or "skipped" in out.err or "not a" in out.err or kind == "tuned"


@pytest.mark.tier("full")
def test_no_msgspec_for_compiling() -> None:
    """Profiles, rules and tuning results, which a compilation reads, need no msgspec."""
    code = (
        "import sys; sys.modules['msgspec'] = None\n"
        "import ub_overlap.compiler.backend\n"
        "from pathlib import Path\n"
        "from ub_overlap.compiler.cost.profile_lookup import load\n"
        "from ub_overlap.compiler.overrides.override_set import parse_overrides\n"
        "from ub_overlap.runtime import autotune\n"
        "load('cpu'); parse_overrides({'forward.*': 'none'}); autotune._load(Path('nowhere'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
