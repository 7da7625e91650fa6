"""Tests of what a terminal user expects of every verb: exit codes, one-line errors, JSON errors, help, pipes, encodings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.diff.samples import before, graphs, report, with_clone
from tests.harness.no_home import leave_home
from tests.harness.ranks import PATIENCE_S
from ub_overlap.cli import build_parser, doctor, failures, info, main
from ub_overlap.cli.completion import SHELLS, complete
from ub_overlap.cli.parsers import Parser, all_parsers
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.runtime import plan_store
from ub_overlap.runtime.errors import ArenaError

TRACE = {"deviceProperties": [], "traceEvents": [
    {"ph": "X", "cat": "kernel", "name": "ncclDevKernel", "ts": 0, "dur": 9, "args": {"device": 0, "stream": 7}},
    {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 5, "dur": 9, "args": {"device": 0, "stream": 8}},
]}  # fmt: skip
GATHER_ONLY = {"qkv_fprop": {"method": "ring_exchange"}}
PYTHON = sys.executable


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a folder with reports, a trace, a configuration and a store with one plan."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UB_OVERLAP_CACHE_DIR", str(tmp_path / "cache"))
    other = {**report(), "graphs": [{**graphs().to_dict(), "before": with_clone(before()).to_dict()}]}
    for name, content in {
        "a.json": report(),
        "b.json": other,
        "trace.json": TRACE,
        "cfg.json": GATHER_ONLY,
        "other.json": [],
    }.items():
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "broken.json").write_text('{"version": 1, "sites": [')
    plan = Plan("forward", ())
    plan_store.save(plan.digest, plan.to_json())
    return tmp_path


CODES = [
    (0, "info"), (2, "info --colour"),
    (2, "doctor --bundle nowhere/x.zip"), (2, "doctor --plan 00"), (2, "doctor --newest few"),
    (0, "report list"), (2, "report"), (2, "report list --all"), (2, "report show"), (2, "report show ffff"),
    (0, "report show DIGEST"),
    (0, "explain a.json"), (0, "explain a.json --site forward.0"), (2, "explain a.json --site forward.9"), (2, "explain"),
    (2, "explain nowhere.json"), (2, "explain other.json"), (2, "explain broken.json"),
    (2, "explain a.json --html nowhere/x.html"),
    (0, "explain DIGEST"), (2, "explain ffff"), (0, "diff DIGEST DIGEST"), (1, "diff DIGEST a.json"), (2, "diff ffff a.json"),
    (0, "diff a.json a.json"), (1, "diff a.json b.json"), (2, "diff a.json"), (2, "diff a.json nowhere.json"),
    (2, "diff other.json a.json"), (2, "diff a.json broken.json"), (2, "diff a.json b.json --dot ."),
    (1, "bisect -- true"), (1, "bisect -- false"), (2, "bisect"), (2, "bisect -- no-such-command"),
    (2, "bisect --loss ( -- true"), (0, "completion bash"), (2, "completion fish"),
    (0, "exposed trace.json"), (2, "exposed"), (2, "exposed nowhere.json"), (2, "exposed other.json"),
    (2, "exposed broken.json"),
    (2, "calibrate"), (2, "calibrate --out nowhere/x.json"), (2, "calibrate --device tpu"),
    (2, "plan"), (2, "plan --model llama-9b"), (2, "plan --model llama-8b --tp 3"), (2, "plan --model llama-8b --save ."),
    (0, "import-cfg cfg.json"), (2, "import-cfg"), (2, "import-cfg nowhere.json"), (2, "import-cfg other.json"),
    (2, "import-cfg broken.json"),
    (0, "clear-cache --dry-run"), (0, "clear-cache --yes"), (2, "clear-cache"), (2, "clear-cache --older-than -1"),
    (2, ""), (2, "nonsense"), (0, "--version"), (0, "--help"),
]  # fmt: skip

STARTS_A_PROCESS = ("bisect -- true", "bisect -- false")


def run(command: str) -> int:
    """Run a command line in this process and return the exit code of the process."""
    digest = next((path.stem for path in plan_store.directory().glob("*.json")), "")
    try:
        return main(command.replace("DIGEST", digest).split())
    except SystemExit as exit:
        return int(exit.code or 0)


@pytest.mark.parametrize(
    ("code", "command"),
    [
        pytest.param(code, command, id=command, marks=[pytest.mark.tier("test")] if command in STARTS_A_PROCESS else [])
        for code, command in CODES
    ],
)
def test_exit_codes(
    code: int, command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bad usage is one line on stderr, nothing on stdout, and no traceback."""
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert run(command) == code
    out, said = capsys.readouterr()
    assert "Traceback" not in said
    if code == 2:
        assert out == "" and len(said.splitlines()) == 1 and said.startswith("python -m ub_overlap") and ": error: " in said


def test_every_verb_has_its_codes_tested() -> None:
    verbs = {command.split()[0] for code, command in CODES if command and not command.startswith("-")}
    assert set(verbs_of(build_parser())) <= verbs
    assert {command.split()[0] for code, command in CODES if code == 2 and command} >= set(verbs_of(build_parser()))


def verbs_of(parser: Parser) -> list[str]:
    return [p.prog.split()[-1] for p in all_parsers(parser) if len(p.prog.split()) == 4]


@pytest.mark.tier("test")
def test_a_machine_without_overlap_is_a_problem(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "_probe", lambda: {"crashed": "exit code -6: no message"})
    assert main(["doctor"]) == 1
    monkeypatch.setattr(info, "info", lambda: {"problem": "no torch"})
    assert main(["info"]) == 1


@pytest.mark.parametrize(
    "command", ["explain other.json --json", "report show ffff --json", "plan --json", "bisect --json", "nonsense --json"]
)
def test_errors_as_json(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command) == 2
    out, said = capsys.readouterr()
    answer = json.loads(out)
    assert (
        answer["exit_code"] == 2
        and answer["error"]["type"] in ("OptionError", "StoredFileError", "UsageError")
        and answer["error"]["what"]
    )
    assert len(said.splitlines()) == 1


def test_codes_in_the_help_are_those_of_failures() -> None:
    codes = {0, failures.FOUND, failures.USAGE, failures.INTERNAL, failures.INTERRUPTED, failures.BROKEN_PIPE}
    assert set(build_parser().exits) == codes


def test_reports_without_a_home_folder(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    leave_home(monkeypatch)
    assert main(["report", "list"]) == 0
    assert capsys.readouterr().out == "no reports: no home folder; set UB_OVERLAP_CACHE_DIR\n"
    assert main(["report", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert main(["report", "show", "ffff"]) == 2
    assert "no home folder" in (said := capsys.readouterr().err) and "set UB_OVERLAP_CACHE_DIR" in said


def raiser(error: BaseException) -> Callable[[], int]:
    def body() -> int:
        raise error

    return body


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            ArenaError("shared memory is full", got="0 bytes", fix="a larger /dev/shm"),
            1,
            "shared memory is full; got: 0 bytes; fix: a larger /dev/shm",
        ),
        (ArenaError("two\nlines"), 1, "two lines"),
        (OSError(28, "No space left on device", "x.json"), 1, "No space left on device: 'x.json'"),
        (PermissionError(13, "Permission denied", "x.json"), 2, "Permission denied: 'x.json'"),
        (OSError("not a gzipped file"), 2, "not a gzipped file"),
        (ConnectionRefusedError(111, "Connection refused"), 1, "Connection refused"),
        (ModuleNotFoundError("No module named 'torch'"), 1, "No module named 'torch'"),
        (KeyError("sites"), 3, "internal error: KeyError: 'sites'; UB_OVERLAP_DEBUG=1"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_failures(error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert failures.guarded(raiser(error), "prog", as_json=True, show_traceback=False) == code
    out, text = capsys.readouterr()
    assert text.startswith("prog: ") and said in text and len(text.splitlines()) == 1
    assert json.loads(out)["exit_code"] == code


@pytest.mark.parametrize("how", ["flag", "variable"])
def test_the_traceback_is_shown_on_request(
    how: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("UB_OVERLAP_DEBUG", raising=False)
    if how == "variable":
        monkeypatch.setenv("UB_OVERLAP_DEBUG", "1")
    assert run(("--traceback " if how == "flag" else "") + "explain other.json") == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.parametrize("parser", all_parsers(build_parser()), ids=lambda parser: parser.prog)
def test_help_has_a_sentence_and_an_example(parser: Parser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = parser.format_help()
    description = parser.description or ""
    assert description.endswith(".") and description[0].isupper() and len(description.split()) > 2
    assert parser.examples and f"\nexamples:\n  {parser.examples[0]}\n" in text and "\nexit codes:\n  0  " in text
    assert all(action.help for action in parser._actions if not action.choices or action.option_strings)
    assert max(map(len, text.splitlines())) <= 80 or any(len(e) > 76 for e in parser.examples)


@pytest.mark.parametrize("parser", all_parsers(build_parser()), ids=lambda parser: parser.prog)
def test_examples_parse(parser: Parser, folder: Path) -> None:
    import shlex

    for example in parser.examples:
        words = shlex.split(example.partition("ub_overlap ")[2].partition(" > ")[0])
        for word in words:
            if word.endswith((".json", ".gz", ".yaml", ".log")) and not word.startswith("-"):
                Path(word).touch()
            elif word.endswith("/"):
                Path(word).mkdir()
        if "VERB" not in words:
            build_parser().parse_args(words)


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    ("words", "expected"), [(["expl"], "explain"), (["report", "sh"], "show"), (["diff", "--js"], "--json")], ids=str
)
def test_completion(words: list[str], expected: str, folder: Path) -> None:
    """bash completes verbs and flags, and knows no other."""
    (folder / "script").write_text(complete(build_parser(), "bash"))
    code = (
        'source ./script; rule=$(complete -p ub-overlap); function=${rule#*-F }; COMP_WORDS=(ub-overlap "$@"); COMP_CWORD=$#; '
        '${function%% *}; echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", code, "bash", *words], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.stdout.split(), done.stderr) == ([expected], "")


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_of_all_shells(shell: str) -> None:
    text = complete(build_parser(), shell)
    assert all(verb in text for verb in verbs_of(build_parser())) and "ub-overlap" in text


@pytest.mark.tier("test")
def test_help_starts_without_heavy_imports() -> None:
    code = (
        "import sys\nfrom ub_overlap.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'numpy', 'rich', 'jinja2', 'tabulate', 'msgspec', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.tier("test")
def test_a_closed_pipe_is_no_error(folder: Path) -> None:
    """`explain ... | head -1`: no message, and the code of a process that SIGPIPE ended."""
    sites = [{**report()["sites"][0], "id": f"forward.{i}"} for i in range(5000)]
    (folder / "long.json").write_text(json.dumps({**report(), "sites": sites, "graphs": []}))
    command = f"{PYTHON} -m ub_overlap explain long.json | head -1; echo codes ${{PIPESTATUS[@]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.stderr == "" and done.stdout.splitlines()[-1] == "codes 141 0"


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("explain a.json > /dev/full", 1),
        ("explain a.json --json > /dev/full", 1),
        ("explain a.json >&-", 0),
        ("explain other.json --json >&-", 2),
        ("--help | (exec <&-; sleep 1); exit ${PIPESTATUS[0]}", 141),
    ],
)
def test_output_that_cannot_be_written(command: str, code: int, folder: Path) -> None:
    """A full device is an error in one line; a stdout that was closed before the start is none."""
    done = subprocess.run(
        ["bash", "-c", f"{PYTHON} -m ub_overlap {command}"], capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert len(done.stderr.splitlines()) == (1 if code in (1, 2) else 0) and "Traceback" not in done.stderr


@pytest.mark.tier("test")
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_locale_without_utf8(encoding: str, folder: Path) -> None:
    """Characters that the encoding of stdout lacks are escaped; files are UTF-8."""
    name = "layers.\u5c42.\u00e9"
    sites = [{**site, "module": name, "source": f"/home/{name}.py:1: x = '\u2192'"} for site in report()["sites"]]
    (folder / "wide.json").write_text(json.dumps({**report(), "sites": sites}, ensure_ascii=False), encoding="utf-8")
    done = subprocess.run(
        [PYTHON, "-X", "utf8=0", "-m", "ub_overlap", "explain", "wide.json", "--dot", "x.dot", "--html", "x.html"],
        env={**os.environ, "PYTHONIOENCODING": encoding, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "layers.\\u5c42." in done.stdout.decode(encoding)
    assert "\u5c42" in (folder / "x.html").read_text(encoding="utf-8") or "\\u5c42" in (folder / "x.html").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize("command", ["explain a.json", "report list", "diff a.json b.json", "import-cfg cfg.json"])
def test_tables_fit_80_columns(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run(command)
    out = capsys.readouterr().out
    tables = [line for line in out.splitlines() if line.startswith("---")]
    assert tables and max(map(len, tables)) <= 80
    monkeypatch.delenv("COLUMNS")
    run(command)
    assert "not shown in" not in capsys.readouterr().out, "a file has no limit"


def test_reports_in_logs_are_plain_text(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --text nothing is colored, and color is for terminals or on request."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    run("explain a.json")
    assert "\x1b" not in capsys.readouterr().out
    run("explain a.json --text")
    assert "\x1b[32m" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    run("explain a.json --text")
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "meant"), [("reprot list", "report"), ("explain --jsn a.json", "--json"), ("report shwo", "show"), ("zzz", "")]
)
def test_a_misspelled_word_is_corrected(command: str, meant: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command) == 2
    said = capsys.readouterr().err
    assert (f"did you mean {meant}?" in said) if meant else ("did you mean" not in said)
