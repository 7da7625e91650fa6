"""Warnings for site patterns and rules that match no site."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from fnmatch import fnmatchcase

from .rule import Rule, SiteDescription


class UnmatchedPatterns:
    """The patterns and rules that were checked so far. Each is reported once per phase."""

    def __init__(self) -> None:
        self._checked: set[tuple[str, str]] = set()

    def check(self, phase: str, sites: Sequence[SiteDescription], patterns: Sequence[str], rules: Sequence[Rule]) -> None:
        """Warn of patterns and rules that match none of `sites`, all of one graph. Each is checked once per `phase`."""
        unmatched: list[str] = []
        for pattern in patterns:
            if _can_match(pattern, phase):  # "backward.*" does not concern forward graphs
                unmatched += self._first_miss(f"pattern {pattern!r}", phase, any(fnmatchcase(s.id, pattern) for s in sites))
        for rule in rules:
            if (rule.phase in ("", phase) or phase == "step") and not rule.optional:
                unmatched += self._first_miss(rule.title, phase, any(rule.matches(s) for s in sites))
        if unmatched:
            modules = ", ".join(dict.fromkeys(m for s in sites for m in s.modules)) or "none"
            warnings.warn(
                f"ub_overlap: overrides match no site of this {phase} graph: {'; '.join(unmatched)}. The graph has "
                f"{len(sites)} collectives ({sites[0].id} to {sites[-1].id}) in the modules "
                f"{modules if len(modules) < 400 else modules[:400] + ', ...'}",
                stacklevel=2,
            )

    def _first_miss(self, name: str, phase: str, is_matched: bool) -> list[str]:
        is_first = (name, phase) not in self._checked
        self._checked.add((name, phase))
        return [name] if is_first and not is_matched else []


def _can_match(pattern: str, phase: str) -> bool:
    """Return whether `pattern` can match a site id "<phase>.<number>"."""
    literal = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
    return f"{phase}.".startswith(literal) or literal.startswith(f"{phase}.")


UNMATCHED = UnmatchedPatterns()
"""The instance of this process: torch's hooks create the passes that fill it, and pass no state on."""
