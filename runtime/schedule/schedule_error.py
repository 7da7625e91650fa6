"""The exception of schedule building and proving, in a file that both builders and checkers import."""

from __future__ import annotations


class ScheduleError(ValueError):
    """A key without a schedule, or a schedule that is not proven safe.

    `rule` names the violated rule ("race", "flag", "circular wait", ...). The message says which ranks and steps, what was
    expected and what was found. A user never causes one: the session converts it into an internal error with a hint.
    """

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"[{rule}] {message}")
        self.rule = rule
