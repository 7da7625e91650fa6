"""options={"rules": [...]}: strategies forced by where a site stands, in order; the last rule that matches a site wins.

    {"module": "layers.*.attention", "kind": "matmul_*", "phase": "forward", "strategy": "pipelined:chunks=R/2"}

module    glob, or a list of globs, of module paths as the report shows them; it takes the module and all that is in it, and
          "*.wq" is a wq anywhere. Default: any module
kind      glob of kinds ("all_gather_matmul", "matmul_*", ...). A kind without "matmul" takes every such collective, whatever
          it meets; one with it only those that meet a matmul. Default: any
phase     "forward", "backward"; default: both
strategy  none, pipelined, bulk, pipelined:chunks=N, pipelined:stripes=N, bulk:chunks=N; N of chunks may be R, R/2 or 2R of a
          group of R ranks; "auto" gives the site back to the automatic choice

options={"plan": ...} names sites one by one and wins over rules.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..plan.reasons import Kind
from ..plan.strategy import Strategy
from .megatron import is_cfg, read_text, rules_of
from .rule import AUTO, PHASES, STRATEGIES, Override, Rule, SiteDescription, refused, resolved

_FIELDS = ("module", "kind", "phase", "strategy", "optional")


def forced_by_rules(rules: Sequence[Rule], place: SiteDescription) -> Override | None:
    """What the last rule that matches forces, if any does."""
    for number in range(len(rules), 0, -1):
        rule = rules[number - 1]
        if rule.matches(place):
            strategy = rule.strategy_for(place.ranks)
            return None if strategy is None else Override(strategy, f"rule {number} ({rule})")
    return None


def parse_rules(value: Any) -> tuple[Rule, ...]:
    """The forms that the option takes: a list of rules (dicts), a Megatron / NeMo tp_comm_overlap_cfg (a dict), or the path of
    a JSON or YAML file with either. OptionError names what is wrong, and where in the file."""
    origin = ""
    if isinstance(value, str | Path):
        origin = str(value)
        value = read_text(value, "rules")
    if isinstance(value, Mapping) and set(value) == {"rules"}:
        value = value["rules"]
    if isinstance(value, Mapping) and is_cfg(value):
        return rules_of(value, origin)
    if isinstance(value, Mapping) or not isinstance(value, list | tuple):
        raise refused(
            origin,
            "",
            value,
            "a list of rules {module, kind, phase, strategy}, a tp_comm_overlap_cfg, or the path of such a file",
        )
    return tuple(_rule(row, origin, f"rules[{i}]") for i, row in enumerate(value))


def _rule(row: Any, origin: str, field: str) -> Rule:
    if isinstance(row, Rule):
        return row
    if not isinstance(row, Mapping):
        raise refused(origin, field, row, "a dict with strategy, and module, kind, phase as wanted")
    for name in row:
        if name not in _FIELDS:
            raise refused(origin, f"{field}.{name}", row[name], f"one of the fields {', '.join(_FIELDS)}")
    if "strategy" not in row:
        raise refused(origin, f"{field}.strategy", "nothing", STRATEGIES)
    module = row.get("module", "*")
    module = (module,) if isinstance(module, str) else module
    if not isinstance(module, list | tuple) or not module or not all(isinstance(m, str) and m for m in module):
        raise refused(origin, f"{field}.module", row["module"], "a glob of module paths, or a list of them")
    kind = row.get("kind") or "*"
    names = [k.value for k in Kind]
    if not isinstance(kind, str) or not any(fnmatchcase(k, kind) for k in names):
        raise refused(origin, f"{field}.kind", row["kind"], f"a glob of {', '.join(names)}")
    phase = row.get("phase") or ""
    if phase not in ("", *PHASES):
        raise refused(origin, f"{field}.phase", row["phase"], "'forward' or 'backward'")
    strategy = row["strategy"]
    if not isinstance(strategy, str) or not (strategy == AUTO or Strategy.is_forceable(resolved(strategy, 2))):
        raise refused(origin, f"{field}.strategy", strategy, STRATEGIES)
    optional = row.get("optional", False)
    if not isinstance(optional, bool):
        raise refused(origin, f"{field}.optional", optional, "True or False")
    return Rule(strategy=strategy, module=tuple(module), kind=kind, phase=phase, optional=optional)


class Unmatched:
    """Patterns and rules that have matched no site so far, told once each."""

    def __init__(self) -> None:
        self._settled: set[tuple[str, str]] = set()

    def check(self, phase: str, places: Sequence[SiteDescription], patterns: Sequence[str], rules: Sequence[Rule]) -> None:
        """Warns of what matches none of `places`, the sites of a graph of `phase`, and matched in no graph of it before."""
        quiet: list[str] = []
        for pattern in patterns:
            if _may_name(pattern, phase):  # "backward.*" says nothing about forward graphs
                quiet += self._told(f"plan pattern {pattern!r}", phase, any(fnmatchcase(p.id, pattern) for p in places))
        for number, rule in enumerate(rules, 1):
            if rule.phase in ("", phase) and not rule.optional:
                quiet += self._told(f"rule {number} ({rule})", phase, any(rule.matches(p) for p in places))
        if quiet:
            seen = ", ".join(dict.fromkeys(m for p in places for m in p.modules)) or "none"
            warnings.warn(
                f"ub_overlap: matches no site of this {phase} graph: {'; '.join(quiet)}. It has {len(places)} collectives "
                f"({places[0].id} to {places[-1].id}) in the modules {seen if len(seen) < 400 else seen[:400] + ', ...'}",
                stacklevel=2,
            )

    def _told(self, what: str, phase: str, matched: bool) -> list[str]:
        first = (what, phase) not in self._settled
        self._settled.add((what, phase))
        return [what] if first and not matched else []


def _may_name(pattern: str, phase: str) -> bool:
    """Could `pattern` match some site id "<phase>.<number>"?"""
    literal = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
    return f"{phase}.".startswith(literal) or literal.startswith(f"{phase}.")


UNMATCHED = Unmatched()
"""The one of this process: the passes that fill it are made by torch's hooks, which hand nothing through."""
