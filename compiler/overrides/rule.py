"""One rule: the sites that it matches, by module, kind and phase, and the strategy that it requests there.

    {"module": "layers.*.attention", "kind": "matmul_*", "phase": "forward", "strategy": "pipelined:chunks=R/2"}

module    glob, or a list of globs, of module paths as the report shows them. It matches the module and all inside it;
          "*.wq" is a wq anywhere. The variable of a compiled function ("model.layers.0") may be omitted. Default: any module
kind      glob of kinds ("all_gather_matmul", "matmul_*", ...). A kind without "matmul" matches every such collective; a kind
          with "matmul" only those next to a matmul. Default: any
phase     "forward" or "backward". Default: both. In the graph of a whole step: the half of the
          site, by the marks of autograd
strategy  see requested_strategy.py
optional  True: no warning where the rule matches no site
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..plan.reasons import Kind
from .option_file import refused
from .requested_strategy import EXPECTED, Override, is_requestable, override_of

HALVES = ("forward", "backward")
FIELDS = ("module", "kind", "phase", "strategy", "optional")


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteDescription:
    """The facts of a site that overrides match, known before it is decided."""

    id: str
    phase: str
    kinds: tuple[str, ...]
    """Kinds of the site: the plain collective, and the collective with its matmuls if it has some."""
    modules: tuple[str, ...]
    ranks: int
    dtype: str = ""
    input: str = ""
    """Shape of the collective's input, "[8, 64]"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule, with the fields above."""

    strategy: str
    module: tuple[str, ...] = ("*",)
    kind: str = "*"
    phase: str = ""
    optional: bool = False
    place: str = field(default="", compare=False, repr=False)
    """Where it was written, for messages: "overrides[0]", "rules.yaml: overrides[0]", or an entry of a cfg."""

    def matches(self, site: SiteDescription) -> bool:
        """Return whether the rule applies to `site`."""
        if self.phase not in ("", site.phase) or not any(fnmatchcase(k, self.kind) for k in site.kinds):
            return False
        return self.module == ("*",) or any(_is_within(path, glob) for path in site.modules for glob in self.module)

    def to_dict(self) -> dict[str, Any]:
        """Return the form that the option takes."""
        module = self.module[0] if len(self.module) == 1 else list(self.module)
        out: dict[str, Any] = {"module": module, "kind": self.kind, "phase": self.phase, "strategy": self.strategy}
        return {k: v for k, v in out.items() if v not in ("", "*")} | ({"optional": True} if self.optional else {})

    @property
    def title(self) -> str:
        """Its place and what it matches: "overrides[0] (module *.wq)". Messages name rules by it."""
        return f"{self.place or 'a rule'} ({self})"

    def __str__(self) -> str:
        module = f"module {', '.join(self.module)}" if self.module != ("*",) else ""
        kind = f"kind {self.kind}" if self.kind != "*" else ""
        return "; ".join(part for part in (module, kind, self.phase) if part) or "any site"


def parse_rule(row: Mapping[Any, Any], origin: str, name: str) -> Rule:
    """Return the rule of a dict. OptionError names the field, and the file `origin`. `name`: the path to the rule."""
    for key in row:
        if key not in FIELDS:
            raise refused(origin, f"{name}.{key}", row[key], f"one of the fields {', '.join(FIELDS)}")
    if "strategy" not in row:
        raise refused(origin, f"{name}.strategy", "nothing", EXPECTED)
    module = row.get("module", "*")
    module = (module,) if isinstance(module, str) else module
    if (
        not isinstance(module, list | tuple)
        or not module
        or not all(isinstance(m, str) and m and m.isprintable() for m in module)
    ):
        raise refused(origin, f"{name}.module", row["module"], "a glob of module paths, or a list of them")
    kind = row.get("kind") or "*"
    names = [k.value for k in Kind]
    if not isinstance(kind, str) or not any(fnmatchcase(k, kind) for k in names):
        raise refused(origin, f"{name}.kind", row["kind"], f"a glob of {', '.join(names)}")
    phase = row.get("phase") or ""
    if phase not in ("", *HALVES):
        raise refused(origin, f"{name}.phase", row["phase"], "'forward' or 'backward'")
    strategy = row["strategy"]
    if not is_requestable(strategy):
        raise refused(origin, f"{name}.strategy", strategy, EXPECTED)
    optional = row.get("optional", False)
    if not isinstance(optional, bool):
        raise refused(origin, f"{name}.optional", optional, "True or False")
    place = f"{Path(origin.partition(', ')[0]).name}: {name}" if origin else name
    return Rule(strategy=strategy, module=tuple(module), kind=kind, phase=phase, optional=optional, place=place)


def find_rule(rules: Sequence[Rule], site: SiteDescription) -> Override | None:
    """Return the request of the last rule that matches `site`, or None."""
    for rule in reversed(rules):
        if rule.matches(site):
            return override_of(rule.strategy, site.ranks, rule.title)
    return None


def _is_within(path: str, glob: str) -> bool:
    """Return whether `glob` matches the module `path` or a module that contains it."""
    parts = path.split(".")
    above = (".".join(parts[: i + 1]) for i in range(len(parts)))
    return any(fnmatchcase(p, glob) or fnmatchcase(f".{p}", glob) for p in above)
