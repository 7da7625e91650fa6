"""The one exception of schedule building and proving; its own file so that builders and checkers can both raise it."""

from __future__ import annotations


class ScheduleError(ValueError):
    """A key that no schedule exists for, or a schedule that is not proven safe.

    `rule` names the rule that failed ("race", "flag", "circular wait", ...), the message says which ranks and steps, what
    was expected and what was found. A user never causes one: the session turns it into an internal error with a hint.
    """

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"[{rule}] {message}")
        self.rule = rule
