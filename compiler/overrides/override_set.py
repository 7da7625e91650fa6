"""options={"overrides": ...}: strategies that the user requests for sites. Its content distinguishes the forms.

    {"forward.3": "pipelined:chunks=4", "backward.*": "none"}     by glob of site ids, as reports show them
    [{"module": "*.wq", "strategy": "none"}, ...]                 rules (rule.py)
    {"qkv_fprop": {"method": "ring_exchange"}, ...}               a Megatron / NeMo tp_comm_overlap_cfg (megatron.py)
    a Plan, or its dict                                           a saved plan (saved_plan.py)
    "file.json", "file.yaml"                                      a file with any of these
    [{"module": ...}, {"forward.3": "none"}, "file.yaml"]         a list with several of these

A site pattern wins over a saved plan, which wins over rules. The last pattern, and the last rule, that matches wins.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ub_overlap.runtime.errors import StoredFileError

from ..plan.plan import Plan
from .megatron import is_tp_comm_overlap_cfg, rules_of_cfg
from .option_file import read_option_file, refused
from .requested_strategy import EXPECTED, Override, is_requestable, override_of
from .rule import FIELDS, Rule, SiteDescription, find_rule, parse_rule
from .saved_plan import SavedGraph, match_saved_graph, parse_saved_plan
from .unmatched_patterns import UNMATCHED

FORMS = (
    "a dict {site pattern: strategy}, a list of rules {module, kind, phase, strategy}, a tp_comm_overlap_cfg, a saved plan, "
    "the path of such a file, or a list of these"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """Everything that the user requests for sites."""

    patterns: tuple[tuple[str, str], ...] = ()
    """(glob of site ids, requested strategy)"""
    rules: tuple[Rule, ...] = ()
    saved: tuple[SavedGraph, ...] = ()
    """The graphs of saved plans."""

    def __bool__(self) -> bool:
        return bool(self.patterns or self.rules or self.saved)

    def __add__(self, other: Overrides) -> Overrides:
        return Overrides(
            patterns=self.patterns + other.patterns, rules=self.rules + other.rules, saved=self.saved + other.saved
        )

    def find(self, phase: str, sites: Sequence[SiteDescription]) -> dict[str, Override]:
        """Return the request for each of `sites` that has one, by site id. `sites`: all of one graph of `phase`.

        OptionError where a saved plan does not fit the graph. Patterns and rules that match nothing are a warning.
        """
        if not (self and sites):
            return {}
        UNMATCHED.check(phase, sites, [pattern for pattern, _ in self.patterns], self.rules)
        saved = match_saved_graph(self.saved, phase, sites)
        requests = {site.id: self._request(site, saved) for site in sites}
        return {site: request for site, request in requests.items() if request is not None}

    def _request(self, site: SiteDescription, saved: Mapping[str, Override]) -> Override | None:
        for pattern, strategy in reversed(self.patterns):
            if fnmatchcase(site.id, pattern):
                return override_of(strategy, site.ranks, f"overrides ({pattern!r})")
        return saved.get(site.id) or find_rule(self.rules, site)


def parse_overrides(value: Any, origin: str = "", field: str = "overrides") -> Overrides:
    """Return the overrides of any form of the option. OptionError names the bad part, and the file `origin`."""
    if value is None:
        return Overrides()
    if isinstance(value, Overrides):
        return value
    if isinstance(value, str | Path):
        return _parse_file(value, origin, field)
    if isinstance(value, Plan):
        return Overrides(saved=parse_saved_plan(json.loads(value.to_json()), origin))
    if isinstance(value, Mapping):
        return _parse_mapping(value, origin, field)
    if isinstance(value, list | tuple):
        parts = [_parse_part(part, origin, f"{field}[{i}]") for i, part in enumerate(value)]
        return sum(parts, Overrides())
    raise refused(origin, "", value, FORMS)


def _parse_file(path: str | Path, origin: str, field: str) -> Overrides:
    """Return the overrides of a file. `origin`, `field`: what names it, if that is a file. Files do not name files in turn."""
    if _INSIDE in origin:
        raise refused(origin, field, str(path), "rules, or a saved plan: this file is named by another one")
    try:
        content = read_option_file(path)
    except StoredFileError as error:
        if not origin:
            raise
        raise refused(origin, field, str(path), "the path of a JSON or YAML file", fix=error.line) from error
    return parse_overrides(content, f"{path}{_INSIDE}{origin}" if origin else str(path))


_INSIDE = ", named by "


def _parse_mapping(value: Mapping[Any, Any], origin: str, field: str) -> Overrides:
    if set(value) == {"rules"}:
        return parse_overrides(value["rules"], origin, "rules")
    if "sites" in value:
        return Overrides(saved=parse_saved_plan(value, origin))
    if is_tp_comm_overlap_cfg(value):
        return Overrides(rules=rules_of_cfg(value, origin))
    for pattern, strategy in value.items():
        if not isinstance(pattern, str) or not is_requestable(strategy):
            part = "" if field == "overrides" and not origin else str(pattern) if field == "overrides" else f"{field}.{pattern}"
            raise refused(origin, part, {pattern: strategy}, f"{EXPECTED}; or: {FORMS}")
    return Overrides(patterns=tuple(value.items()))


def _parse_part(part: Any, origin: str, field: str) -> Overrides:
    """Return the overrides of one element of a list."""
    if isinstance(part, Rule):
        return Overrides(rules=(part if part.place else replace(part, place=field),))
    if isinstance(part, Mapping) and "sites" not in part and any(name in FIELDS for name in part):
        return Overrides(rules=(parse_rule(part, origin, field),))
    if isinstance(part, list | tuple) and len(part) == 2 and all(isinstance(text, str) for text in part):
        return _parse_mapping({part[0]: part[1]}, origin, field)
    if isinstance(part, Mapping | str | Path | Plan | Overrides):
        return parse_overrides(part, origin, field)
    raise refused(origin, field, part, f"a rule: a dict with strategy, and module, kind, phase; or: {FORMS}")
