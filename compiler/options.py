"""The backend's options: parsed, validated, hashable.

`torch.compile(model, backend="ub_overlap", options={...})`. Keys that are not ours go to Inductor by their names; a key that
neither knows is an `OptionError` that lists what is allowed.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from ub_overlap import _torch_compat as compat
from ub_overlap.runtime.errors import OptionError

from .cost.profile_lookup import load
from .fp8.recipe import RECIPES
from .overrides.rule import Override, Rule
from .overrides.rules import parse_rules
from .overrides.saved_plan import SavedGraph, parse_plan, without
from .plan.strategy import MAX_CHUNKS, DispatchTable, Strategy
from .plan.strategy import parse as parse_strategy

DEFAULT_MIN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user can switch."""

    overlap: Literal["auto", "force", "off"] = "auto"
    """auto: sites where overlap is predicted to be faster; force: every legal site; off: none."""
    min_bytes: int = DEFAULT_MIN_BYTES
    """Threshold of auto: bytes that a rank sends in the collective."""
    chunks: int = 0
    """Pieces a gathered or scattered dim is cut into, over all ranks; 0: as many as are predicted to be best."""
    save: Literal["gathered", "shard"] = "gathered"
    """What backward keeps of a gathered activation or weight: all of it (fast), or the shard (gathered again, overlapped)."""
    memory_budget: float | None = None
    """How much of the gathered tensors backward keeps whole where `save` does not say: up to 1 a share of their bytes, as
    torch's activation_memory_budget; above 1 bytes a rank. None: no limit."""
    on_miss: Literal["ignore", "warn", "error"] = "ignore"
    """What a collective beside a matmul that could not be matched causes."""
    merge_all_reduces: bool = True
    """all_reduce(a) + all_reduce(b) -> all_reduce(a + b)."""
    inner: Literal["inductor", "aot_eager"] = "inductor"
    """Who compiles the rewritten graph."""
    mode: str | None = None
    """Inductor's mode ("max-autotune", ...), which torch.compile refuses beside options."""
    timeout_s: float | None = None
    """Deadline of every wait for a peer, in seconds (None: UB_OVERLAP_STEP_TIMEOUT_S, else 100)."""
    plan: tuple[tuple[str, str], ...] = ()
    """Strategies forced by site: (pattern of site ids, strategy). Given as a dict, the path of such a JSON file, or a Plan."""
    rules: tuple[Rule, ...] = ()
    """Strategies forced by module, kind and phase (rules.py); `plan` wins. Given as a list of dicts, a Megatron / NeMo
    tp_comm_overlap_cfg, or the path of a JSON or YAML file with either."""
    saved: tuple[SavedGraph, ...] = ()
    """What the sites of a whole saved `plan` were: no option of its own."""
    tune: bool = False
    """The best predicted strategies of a site are timed on its ranks at its first call, and the fastest is kept."""
    fp8: Literal["off", "forward", "all"] = "off"
    """Which products of linears are computed in float8: none, those of the forward, gradients too."""
    fp8_recipe: Literal["tensorwise", "delayed", "rowwise"] = "tensorwise"
    """Where the scales lie, and of which values they are (fp8/recipe.py)."""
    fp8_weights: Literal["kept", "call"] = "kept"
    """Is the cast of a weight kept and made anew where the weight has changed (once a step, a byte a parameter), or is it made
    in each call of the graph?"""
    fp8_state: str = ""
    """Names the histories of fp8_recipe="delayed": models with the same module paths in one process need two."""
    fp8_filter: Callable[[str, tuple[int, int]], bool] | None = None
    """(module path, local shape of the weight as (out, in)) -> is this linear computed in float8? Compile caches are off with
    it unless it has an attribute `key`, a text that names what it does."""
    fp8_reduce_scatter: bool = False
    """What float8 products scatter travels as float8, with a scale for each 128 columns of a row."""
    profile: str | None = None
    """Device profile that choices rest on: the name of a shipped one, or a path (None: this machine's)."""
    verify: bool = False
    """Run every rewritten site the plain way too and compare: reports list the error by site. Slow; not for CUDA graphs."""
    snapshots: bool = True
    """Keep each graph as it was before and after, for reports, pages and errors."""

    def forced(self, site: str) -> Strategy | DispatchTable | None:
        """The strategy that `plan` forces on this site id, if any; the last matching pattern wins."""
        found = self.forced_by_plan(site)
        return found.strategy if found else None

    def forced_by_plan(self, site: str) -> Override | None:
        """The same, with the pattern that says so."""
        found = None
        for pattern, strategy in self.plan:
            if fnmatchcase(site, pattern):
                found = Override(parse_strategy(strategy), f"the plan ({pattern!r})")
        return found

    def key(self) -> str:
        """Everything that a compiled graph depends on, as text for cache keys."""
        return repr([*((f.name, getattr(self, f.name)) for f in fields(self) if f.name not in _UNCOMPILED), self.filter_key])

    @property
    def filter_key(self) -> str:
        """Names what `fp8_filter` does; "" without one."""
        return str(getattr(self.fp8_filter, "key", "")) if self.fp8_filter is not None else ""

    @property
    def cacheable(self) -> bool:
        """May compiled graphs be kept? A function that cannot name what it does may do something else tomorrow."""
        return self.fp8_filter is None or isinstance(getattr(self.fp8_filter, "key", None), str)


_UNCOMPILED = ("timeout_s", "snapshots", "fp8_filter")  # the runtime's, what only tells of a graph, what has a key of its own
_CHOICES = {
    "overlap": ("auto", "force", "off"),
    "save": ("gathered", "shard"),
    "on_miss": ("ignore", "warn", "error"),
    "inner": ("inductor", "aot_eager"),
    "merge_all_reduces": (True, False),
    "tune": (True, False),
    "fp8": ("off", "forward", "all"),
    "fp8_recipe": RECIPES,
    "fp8_weights": ("kept", "call"),
    "fp8_reduce_scatter": (True, False),
    "verify": (True, False),
    "snapshots": (True, False),
}
_NAMES = tuple(f.name for f in fields(Options) if f.name != "saved")


def parse(options: Mapping[str, Any] | None, inductor_names: frozenset[str]) -> tuple[Options, dict[str, Any]]:
    """(our options, Inductor's options) of a user's dict. OptionError names the option, its value and the allowed ones."""
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    for name, value in (options or {}).items():
        if name == "plan":
            ours["plan"], ours["saved"] = parse_plan(value)
        elif name in _NAMES:
            ours[name] = _checked(name, value)
        elif name.replace("-", "_") in inductor_names:
            theirs[name] = value
        else:
            near = difflib.get_close_matches(name, [*_NAMES, *inductor_names], n=3)
            raise OptionError(
                what=f"unknown option {name!r}",
                where="torch.compile(..., options=...)",
                got=f"{name}={value!r}",
                expected=f"one of {', '.join(_NAMES)}, or an option of torch._inductor.config",
                fix=f"did you mean {' or '.join(near)}?" if near else "remove it",
            )
    if ours.get("inner") == "aot_eager" and (theirs or ours.get("mode")):
        raise _bad("inner", "aot_eager", "no options or mode of Inductor beside it", "drop them, or use inner='inductor'")
    if "save" in ours:
        ours.pop("memory_budget", None)  # what is said outright needs no weighing
    if off := disabled():
        ours["plan"] = (*ours.get("plan", ()), *((pattern, "none") for pattern in off))
        ours["saved"] = without(ours.get("saved", ()), off)
    return Options(**ours), theirs


def disabled() -> tuple[str, ...]:
    """Patterns of sites that UB_OVERLAP_DISABLE leaves alone, whatever else asks for them: "forward.3,backward.*"."""
    return tuple(filter(None, os.environ.get("UB_OVERLAP_DISABLE", "").replace(" ", "").split(",")))


def _checked(name: str, value: Any) -> Any:
    if name in _CHOICES:
        if not any(value is c or (isinstance(c, str) and value == c) for c in _CHOICES[name]):
            raise _bad(name, value, "one of " + ", ".join(map(repr, _CHOICES[name])))
        return value
    if name in ("min_bytes", "chunks"):
        most = MAX_CHUNKS if name == "chunks" else math.inf
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
            raise _bad(name, value, f"an integer from 0 to {MAX_CHUNKS}" if name == "chunks" else "an integer of at least 0")
        return value
    if name == "memory_budget":
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0):
            raise _bad(name, value, "None, a share from 0 to 1, or bytes (above 1)")
        return None if value is None else float(value)
    if name == "fp8_state":
        if not isinstance(value, str) or ";" in value:
            raise _bad(name, value, 'a name without ";"')
        return value
    if name == "fp8_filter":
        if value is not None and not callable(value):
            raise _bad(name, value, "None, or a function of (module path, (out, in)) that says whether it is float8")
        return value
    if name == "timeout_s":
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1e9):
            raise _bad(name, value, "a number of seconds above 0 (1e9 at most), or None")
        return None if value is None else float(value)
    if name == "profile":
        if value is not None and not isinstance(value, str | Path):
            raise _bad(name, value, "None, the name of a shipped profile, or a path")
        if value is not None:
            load(str(value))  # OptionError names file and field
        return None if value is None else str(value)
    if name == "mode":
        if value is not None and value not in (modes := compat.inductor_modes()):
            raise _bad(name, value, "None or one of " + ", ".join(map(repr, modes)))
        return value
    return parse_rules(value)


def _bad(name: str, value: Any, expected: str, fix: str = "") -> OptionError:
    return OptionError(
        what=f"bad value of option {name!r}",
        where="torch.compile(..., options=...)",
        got=f"{name}={value!r}",
        expected=expected,
        fix=fix or f"set {name} to {expected}",
    )
