"""Tests of tables and of what a terminal shows: widths, left-out columns, color variables, no escape codes in logs."""

from __future__ import annotations

import io
import itertools

import pytest

from ub_overlap.compiler.text import terminal
from ub_overlap.compiler.text.table import render_table
from ub_overlap.compiler.text.times import format_times

ROWS = [
    {"site": "forward.0", "kind": "all_gather_matmul", "module": "layers.0.attention.wq", "bytes": 262144, "gain": 12.345},
    {"site": "backward.11", "kind": "matmul_reduce_scatter", "module": "", "bytes": 1, "gain": None, "reason": "no_matmul"},
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_table_without_a_limit() -> None:
    assert render_table(ROWS, floats=".1f") == (
        "site         kind                   module                   bytes    gain  reason\n"
        "-----------  ---------------------  ---------------------  -------  ------  ---------\n"
        "forward.0    all_gather_matmul      layers.0.attention.wq   262144    12.3  -\n"
        "backward.11  matmul_reduce_scatter                               1       -  no_matmul"
    )
    assert render_table([]) == ""


@pytest.mark.parametrize(("width", "left_out"), [(40, "module, bytes"), (60, "module"), (80, ""), (90, "")])
def test_a_table_fits_its_width(width: int, left_out: str) -> None:
    """Cells wrap, and keep all of their text; where that is not enough, optional columns are left out in order and named."""
    text = render_table(ROWS, width=width, optional=("module", "bytes"))
    assert max(map(len, text.splitlines())) <= width
    shown = "".join(itertools.takewhile(lambda line: not line.startswith("not shown"), text.splitlines(keepends=True)))
    assert ("module" in shown) == (width > 60) and ("bytes" in shown) == (width > 40)
    assert (
        text.removeprefix(shown).replace("\n", " ").startswith(f"not shown in {width} columns: {left_out}" if left_out else "")
    )
    assert ("not shown" in text) == bool(left_out)
    squeezed = "".join(shown.split())
    assert "gain" in shown and "reason" in shown
    if width >= 60:
        assert "forward.0" in squeezed and "no_matmul" in squeezed


def sites(strategies: int) -> list[dict[str, object]]:
    """Rows as of a report, and their predictions of so many strategies; nothing was measured."""
    times = {"none": 8210.0, "pipelined": 5035.0, **{f"pipelined:chunks={n}": 5249.0 for n in range(1, strategies)}}
    return [
        {
            "site": f"backward.{n}", "kind": "matmul_reduce_scatter", "module": "layers.1.feed_forward.w3",
            "line": "model.py:82",
            "bytes sent": 524288, "predicted us": format_times(times, "pipelined"), "measured us": None, "tuned": "",
            "decision": "pipelined",
        }
        for n in range(3)
    ]  # fmt: skip


def test_columns_without_values_are_left_out_first() -> None:
    """Then predictions take their short form, and long names are wrapped between their parts; then columns are left out."""
    rows = sites(6)
    assert "measured us" in render_table(rows) and "pipelined:chunks=5 5249" in render_table(rows)
    wide = render_table(rows, width=260, optional=("line", "predicted us", "module"))
    assert "pipelined:chunks=5 5249" in wide and wide.endswith("\nwithout values: measured us, tuned")
    narrow = render_table(rows, width=80, optional=("bytes sent", "line", "predicted us", "module")).splitlines()
    header = " ".join(narrow[0].split())
    assert max(map(len, narrow)) <= 80 and header.startswith("site kind module") and "predicted" in header
    assert "8210 -> 5035" in narrow[3] and "layers.1." in narrow[3] and "5249" not in "".join(narrow)
    assert " ".join(narrow[-2:]) == (
        "not shown in 80 columns: bytes sent (a wider terminal or --json shows them); without values: measured us, tuned"
    )


def test_predictions_where_nothing_is_overlapped() -> None:
    assert format_times({"none": 615.2, "pipelined": 700.0}, "none").short == "615"
    assert format_times({}, "none") == format_times({}, "pipelined").short == ""


def test_strings_are_not_numbers() -> None:
    """A digest of digits keeps its zeros; lines in a cell stay lines."""
    assert "00112233" in render_table([{"digest": "00112233"}]) and "1e10" in render_table([{"digest": "1e10"}])
    assert "[256, 512] @ [512, 1024]" in render_table([{"shape": "[256, 512] @ [512, 1024]"}], width=80)


def test_titles_may_repeat() -> None:
    text = render_table([{"a": 1, "b": 2}], titles={"a": "ms", "b": "ms"})
    assert text.splitlines()[0].split() == ["ms", "ms"] and text.splitlines()[2].split() == ["1", "2"]


@pytest.mark.parametrize(
    ("variables", "in_a_terminal", "in_a_file"),
    [
        ({}, True, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"NO_COLOR": ""}, True, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"FORCE_COLOR": "0"}, False, False),
        ({"TERM": "dumb"}, False, False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, True, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, False),
    ],
    ids=str,
)
def test_color(variables: dict[str, str], in_a_terminal: bool, in_a_file: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert terminal.wants_color(Terminal()) is in_a_terminal and terminal.wants_color(io.StringIO()) is in_a_file
    assert terminal.paint("x", 31, False) == "x" and terminal.paint("x", 31, True) == "\x1b[31mx\x1b[0m"


def test_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert terminal.output_width(io.StringIO()) is None and (terminal.output_width(Terminal()) or 0) > 0
    monkeypatch.setenv("COLUMNS", "72")
    assert terminal.output_width(io.StringIO()) == 72
    closed = io.StringIO()
    closed.close()
    assert not terminal.is_terminal(closed)
