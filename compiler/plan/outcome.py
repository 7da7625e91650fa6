"""What became of a collective, in the words and colors of pages and tables: its mode, or why it stays.

The name is the CSS variable of page.css and the class of fragment.css.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .reasons import Reason
from .strategy import Mode


@dataclass(frozen=True, slots=True)
class DecisionOutcome:
    name: str
    label: str
    is_overlapped: bool = False


ALONE, MISSED = DecisionOutcome("alone", "left alone"), DecisionOutcome("missed", "missed")
_LABELS = {Mode.ONE_SHOT: "one-shot kernel", Mode.TWO_SHOT: "two-shot kernel"}
BY_MODE = {mode: DecisionOutcome(mode.value, _LABELS.get(mode, mode.value), mode.is_overlapped) for mode in Mode} | {
    Mode.NONE: ALONE
}
OUTCOMES = (*(outcome for outcome in BY_MODE.values() if outcome is not ALONE), MISSED, ALONE)
BY_CHOICE = frozenset({
    Reason.DISABLED_BY_USER, Reason.BELOW_THRESHOLD, Reason.NO_GAIN, Reason.NO_MATMUL, Reason.TRIVIAL_GROUP,
    Reason.MATMUL_TAKEN, Reason.SCALES,
})  # fmt: skip
"""Reasons of collectives that stay by choice, or have nothing to hide behind: no problem to solve."""


def outcome_of(strategy: str, reason: str | None) -> DecisionOutcome:
    """Return the outcome of a decision, as a report stores it. Of a table of strategies, that of the first overlapped one."""
    if reason:
        return ALONE if reason in BY_CHOICE else MISSED
    overlapped = [mode for mode in re.findall(r"[a-z]\w*", strategy) if mode in _MODES]
    return BY_MODE[Mode(overlapped[0])] if overlapped else ALONE


_MODES = {mode.value for mode in Mode if mode is not Mode.NONE}
