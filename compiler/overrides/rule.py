"""One rule: the sites it takes, by module, kind and phase, and the strategy it forces there (read and applied by rules.py)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ub_overlap.runtime.errors import OptionError

from ..plan.strategy import MAX_CHUNKS, DispatchTable, Strategy, parse

AUTO = "auto"
PHASES = ("forward", "backward")
STRATEGIES = (
    "auto, none, pipelined, bulk, pipelined:chunks=N, pipelined:stripes=N or bulk:chunks=N (N of chunks: also R, R/2, 2R)"
)
_OF_RANKS = re.compile(r"((?:pipelined|bulk):chunks=)(R/2|2R|R)\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteDescription:
    """What rules and plans see of a site before it is decided."""

    id: str
    phase: str
    kinds: tuple[str, ...]
    """What it may be called: the plain collective, and the site it makes with its matmuls if it makes one."""
    modules: tuple[str, ...]
    ranks: int
    dtype: str = ""
    input: str = ""
    """Shape of the collective's input, "[8, 64]"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule; its fields are described in rules.py."""

    strategy: str
    module: tuple[str, ...] = ("*",)
    kind: str = "*"
    phase: str = ""
    optional: bool = False
    """No warning where it matches nothing."""

    def matches(self, place: SiteDescription) -> bool:
        if self.phase not in ("", place.phase) or not any(fnmatchcase(k, self.kind) for k in place.kinds):
            return False
        return self.module == ("*",) or any(_within(path, glob) for path in place.modules for glob in self.module)

    def strategy_for(self, ranks: int) -> Strategy | DispatchTable | None:
        """What it forces in a group of `ranks`; None for "auto"."""
        if self.strategy == AUTO:
            return None
        return parse(resolved(self.strategy, ranks))

    def to_dict(self) -> dict[str, Any]:
        module = self.module[0] if len(self.module) == 1 else list(self.module)
        out: dict[str, Any] = {"module": module, "kind": self.kind, "phase": self.phase, "strategy": self.strategy}
        return {k: v for k, v in out.items() if v not in ("", "*")} | ({"optional": True} if self.optional else {})

    def __str__(self) -> str:
        module = f"module {', '.join(self.module)}" if self.module != ("*",) else ""
        kind = f"kind {self.kind}" if self.kind != "*" else ""
        return "; ".join(part for part in (module, kind, self.phase) if part) or "any site"


@dataclass(frozen=True, slots=True)
class Override:
    """A strategy that the user asked for, and where: "rule 2 (module ...)", "the plan ('backward.*')"."""

    strategy: Strategy | DispatchTable
    by: str


def _within(path: str, glob: str) -> bool:
    """Does `glob` take the module `path` or one that holds it?"""
    parts = path.split(".")
    above = (".".join(parts[: i + 1]) for i in range(len(parts)))
    return any(fnmatchcase(p, glob) or fnmatchcase(f".{p}", glob) for p in above)


def resolved(strategy: str, ranks: int) -> str:
    """`strategy` with R, R/2 (one at least) and 2R as numbers."""
    match = _OF_RANKS.match(strategy)
    if not match:
        return strategy
    chunks = {"R": ranks, "R/2": max(1, ranks // 2), "2R": 2 * ranks}[match[2]]
    return f"{match[1]}{min(chunks, MAX_CHUNKS)}"


def refused(origin: str, field: str, got: Any, expected: str, option: str = "rules", fix: str = "") -> OptionError:
    """The error for a part of an option: `origin` is the file it came from ("": none), `field` the way to the part."""
    where = ", ".join(filter(None, [origin and f"file {origin}", field and f"field {field}"]))
    return OptionError(
        what=f"bad value of option {option!r}",
        where=where or "torch.compile(..., options=...)",
        got=f"{field or option}={got!r}",
        expected=expected,
        fix=fix,
    )
