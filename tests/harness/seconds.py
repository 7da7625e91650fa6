"""Seconds of the tests by file and tier: recorded by a run, read to order the next one, and shown in CONTRIBUTING.md.

pytest -n 2 --tier full --record tests      stores what it measured in tests/harness/seconds.json, for whole files
python -m tests.harness.seconds             writes the table of CONTRIBUTING.md
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.tiers import TIERS, tier_of

STORED = Path(__file__).with_name("seconds.json")
PAGE = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"
BEGIN, END = "<!-- seconds: python -m tests.harness.seconds -->\n", "<!-- end -->\n"

Seconds = dict[str, dict[str, list[float]]]
"""File -> tier -> [tests, seconds of one process]."""


def load() -> Seconds:
    """Return what is stored; nothing where nothing is."""
    return json.loads(STORED.read_text()) if STORED.is_file() else {}


class Recorder:
    """A plugin that sums the seconds of tests, and stores them at the end of the run."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        outcome = yield
        outcome.get_result().user_properties.append(("tier", tier_of(item)))  # type: ignore[attr-defined]

    def pytest_runtest_logreport(self, report: Any) -> None:
        tier = dict(report.user_properties).get("tier", TIERS[0])
        total = self._seconds[report.nodeid.partition("::")[0], tier]
        total[0] += report.when == "call"
        total[1] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):  # xdist: the controller sees all reports
            return
        stored, last = load(), session.config.getoption("--tier") or TIERS[-1]
        for file in {file for file, _ in self._seconds}:  # what ran is measured again: a file may have lost its tests of a tier
            stored[file] = {t: kept for t, kept in stored.get(file, {}).items() if TIERS.index(t) > TIERS.index(last)}
        for (file, tier), (tests, seconds) in self._seconds.items():
            stored[file][tier] = [tests, round(seconds, 1)]
        kept = {file: tiers for file, tiers in sorted(stored.items()) if Path(file).is_file()}
        STORED.write_text(json.dumps(kept, indent=0) + "\n")


def table(seconds: Seconds) -> str:
    """Return the Markdown table of folders: tests and seconds by tier."""
    folders: dict[str, dict[str, list[float]]] = defaultdict(lambda: {tier: [0, 0.0] for tier in TIERS})
    for file, tiers in seconds.items():
        parts = Path(file).parts
        name = "/".join(parts[:2]) if len(parts) > 2 else "files in `tests`"
        for of in (folders[name if name.startswith("files") else f"`{name}`"], folders["all"]):
            for tier, (tests, took) in tiers.items():
                of[tier][0] += tests
                of[tier][1] += took
    order = sorted(folders, key=lambda name: (name == "all", -sum(took for _, took in folders[name].values())))
    titles = [f"{tier}, {what}" for tier in TIERS for what in ("tests", "s")]
    lines = [f"| folder | {' | '.join(titles)} |", f"|---|{'---:|' * len(titles)}"]
    for name in order:
        cells = [text for tests, took in folders[name].values() for text in (f"{tests:.0f}", f"{took:.0f}")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def with_table(page: str, seconds: Seconds) -> str:
    """Return CONTRIBUTING.md with the table between its two marks."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + "\n" + table(seconds) + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(), load()))
