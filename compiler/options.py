"""The backend's options: parsed, validated, hashable.

`torch.compile(model, backend="ub_overlap", options={...})`. Names that are not ours go to Inductor. A name that neither knows
is an `OptionError` with the allowed names; a name of an earlier version is one with the new spelling.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import torch

from ub_overlap import _torch_compat as compat
from ub_overlap.runtime.errors import OptionError
from ub_overlap.runtime.typed_fields import (
    Check,
    check_values,
    describe_fields,
    integer_from,
    markdown_table,
    number,
    optional,
    typed_field,
)

from .cost.profile_lookup import load
from .fp8_config import Fp8Config, parse_fp8
from .overrides.override_set import FORMS, Overrides, parse_overrides
from .plan.plan import Plan

DEFAULT_MIN_BYTES = 1 << 20
DEFAULT_SPLIT_BYTES = 512 << 20


REDUCE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _checked_dtype(value: Any) -> str:
    name = str(value).removeprefix("torch.") if isinstance(value, torch.dtype | str) else ""
    if name not in REDUCE_DTYPES:
        raise ValueError
    return name


def _checked_profile(value: Any) -> str:
    if not isinstance(value, str | Path):
        raise ValueError
    load(str(value))  # OptionError names file and field
    return str(value)


def _checked_mode(value: Any) -> str:
    modes = compat.inductor_modes()
    if value not in modes:
        raise _refused("mode", value, "None or one of " + ", ".join(map(repr, modes)))
    return str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of one compilation."""

    overlap: Literal["auto", "force", "off"] = typed_field(
        "auto", '"auto": sites where overlap is predicted to be faster; "force": every legal site; "off": none'
    )
    pack: Literal["auto", "force", "off"] = typed_field(
        "auto",
        'matmuls of one site as one, on packed operands (q, k, v; w1, w3). "auto": where predicted to be faster; '
        '"force": wherever legal; "off": nowhere. Matmuls of few tokens in a graph with fused collectives too, where '
        "`ub_overlap.pack` has packed their weights",
    )
    independent_matmuls: Literal["auto", "bulk", "off"] = typed_field(
        "auto",
        'matmuls that neither read nor feed a collective (weight gradients), computed during its transfers. "auto": where '
        'predicted to be faster; "bulk": only where the collective then has no matmul of its own; "off": nowhere',
    )
    split: Literal["auto", "off"] = typed_field(
        "auto",
        'collectives that start early and finish late, with everything between that the graph computes. "auto": where '
        'predicted to be faster, with overlap="force" where nothing else overlaps them; "off": only where an override says so',
    )
    hierarchical: Literal["auto", "force", "off"] = typed_field(
        "auto",
        "split gathers and reduce_scatters of a group with several ranks on each of several hosts as two: across hosts over "
        'c10d, within a host by our copies. "auto": where predicted to be faster than one over c10d; "force": wherever '
        'legal; "off": nowhere',
    )
    split_bytes: int = typed_field(
        DEFAULT_SPLIT_BYTES,
        "limit of the landing memory and of the inputs of split collectives that a graph has open at one time",
        integer_from(0),
        f"`{DEFAULT_SPLIT_BYTES}`, bytes",
    )
    split_tokens: Literal["auto", "force", "off"] = typed_field(
        "auto",
        "layers declared by `ub_overlap.tokenwise` in two halves of their tokens, each exchanged while the other one computes. "
        '"auto": where predicted to be faster; "force": all; "off": none. Weight gradients are then sums of two parts',
    )
    zero_copy: Literal["auto", "off"] = typed_field(
        "off",
        'split gathers whose result is not copied out of landing memory. "auto": where all readers are in the graph and it is '
        'predicted to be faster; "off": none. For `memory_budget=0`, as a CUDA graph: on two H100s it gains 1.0 ms of 41',
    )
    coalesce: Literal["auto", "off"] = typed_field(
        "auto",
        "split gathers of parameters and reductions of gradients as one coalesced collective, which has the fixed steps of one "
        'and copies nothing to join them. "auto": neighbors, where predicted to be faster; "off": only those below '
        "`min_bytes`, copied together",
    )
    few_tokens: Literal["auto", "off"] = typed_field(
        "auto",
        'collectives of few tokens as one kernel with what follows them: bias, norms, residual. "auto": where the profile says '
        'that they are faster, of any size below `min_bytes` too; "off": by overrides only',
    )
    min_bytes: int = typed_field(
        DEFAULT_MIN_BYTES,
        '"auto" overlaps collectives in which a rank sends at least this many bytes. Smaller gathers of parameters and '
        "reductions of gradients are sent together",
        integer_from(0),
        f"`{DEFAULT_MIN_BYTES}`, bytes",
    )
    overrides: Overrides = typed_field(
        Overrides(),
        "strategies for single sites: by site id, by module, kind and phase, from a Megatron cfg, or from a saved plan",
        Check(FORMS, parse_overrides),
        "`None`, dict, list, Plan, path",
    )
    memory_budget: float | None = typed_field(
        None,
        "limit of the gathered tensors kept for backward; others are kept as shards and gathered again. Up to 1: a share of "
        "their bytes, as torch's activation_memory_budget; above 1: bytes per rank; 0: shards only; None: no limit. Gathers "
        "that no matmul reads (weights of norms) do not count",
        optional(number("a share from 0 to 1, or bytes (above 1)", lambda value: value >= 0)),
        "`None`, share, bytes",
    )
    reduce_dtype: str | None = typed_field(
        None,
        "type in which the gradients that a backward graph returns are sent; sums are taken in fp32. None: before a cast to "
        "fp32 the type in front of it, which has the same summands; a type as wide as the traced one: as traced; a narrower "
        "one: gradients are rounded to it, which changes results",
        optional(Check(f"one of {', '.join(map(repr, REDUCE_DTYPES))}, or such a torch.dtype", _checked_dtype)),
        f"`None`, {', '.join(f'`{name!r}`' for name in REDUCE_DTYPES)}, torch.dtype".replace("'", '"'),
    )
    scatter_first: bool = typed_field(
        False,
        "hybrid sharding (HSDP): an all_reduce over replicas moves behind the reduce_scatter of its result over shards, as in "
        "FSDP2, so that it sends one shard. The sums are the same up to their order. With every `overlap`",
    )
    fp8: Fp8Config = typed_field(
        Fp8Config(products="off"),
        "matmuls of linears in float8: of the forward, or all; a dict or ub_overlap.Fp8Config sets more",
        Check("one of 'off', 'forward', 'all', or a dict of the fields of ub_overlap.Fp8Config", parse_fp8),
        '`"off"`, `"forward"`, `"all"`, dict, Fp8Config',
    )
    profile: str | None = typed_field(
        None,
        "device profile of the predictions: a shipped one or a file; None: this machine's",
        optional(Check("the name of a shipped profile, or a path", _checked_profile)),
        "`None`, name, path",
    )
    defer_weight_gradients: bool = typed_field(
        False,
        "backward graphs in two parts: gradients of inputs, then of parameters. `ub_overlap.pipeline.Stage` runs the second "
        "part behind its send, or as the W of a zero-bubble schedule; elsewhere both run at once",
    )
    autotune: bool = typed_field(
        False, "time the best predicted strategies of a site on its ranks at its first call, and keep the fastest"
    )
    on_unmatched: Literal["ignore", "warn", "error"] = typed_field(
        "ignore", "what to do when a collective next to a matmul is not matched"
    )
    inner: Literal["inductor", "aot_eager"] = typed_field("inductor", "the compiler of the rewritten graph")
    mode: str | None = typed_field(
        None,
        'Inductor\'s mode ("max-autotune", ...), which torch.compile does not accept together with options',
        optional(Check("a mode of Inductor", _checked_mode)),
        "`None`, mode",
    )
    verify: bool = typed_field(
        False, "also run every rewritten site without overlap and report the error per site. Slow; not for CUDA graphs"
    )

    def __post_init__(self) -> None:
        for name, value in check_values(Options, {f.name: getattr(self, f.name) for f in fields(self)}, _refused).items():
            object.__setattr__(self, name, value)

    def key(self) -> str:
        """Return a text of all that compiled graphs depend on, for cache keys."""
        return repr([*((f.name, getattr(self, f.name)) for f in fields(self) if f.name != "fp8"), self.fp8.key()])

    @property
    def gradient_dtype(self) -> torch.dtype | None:
        """`reduce_dtype` as a type."""
        return None if self.reduce_dtype is None else REDUCE_DTYPES[self.reduce_dtype]

    @property
    def is_cacheable(self) -> bool:
        """Whether compiled graphs may be cached. The behavior of a filter without a key may change between runs."""
        return self.fp8.filter_key is not None


Switch = Literal["auto", "off"]
ForcedSwitch = Literal["auto", "force", "off"]
OverridesForm = Overrides | Plan | Mapping[Any, Any] | str | Path | Sequence[Mapping[Any, Any] | str | Path | Plan | Overrides]


class OptionValues(TypedDict, total=False):
    """The fields of `Options` with the values that users may give, for type checkers."""

    overlap: ForcedSwitch
    pack: ForcedSwitch
    independent_matmuls: Literal["auto", "bulk", "off"]
    split: Switch
    hierarchical: ForcedSwitch
    split_bytes: int
    split_tokens: ForcedSwitch
    zero_copy: Switch
    coalesce: Switch
    few_tokens: Switch
    min_bytes: int
    overrides: OverridesForm | None
    memory_budget: float | None
    reduce_dtype: Literal["float32", "bfloat16", "float16"] | torch.dtype | None
    scatter_first: bool
    fp8: Literal["off", "forward", "all"] | Mapping[str, Any] | Fp8Config
    profile: str | Path | None
    defer_weight_gradients: bool
    autotune: bool
    on_unmatched: Literal["ignore", "warn", "error"]
    inner: Literal["inductor", "aot_eager"]
    mode: str | None
    verify: bool


NAMES = tuple(f.name for f in fields(Options))

RENAMED = {
    "plan": "overrides={value}",
    "rules": "overrides={value}",
    "chunks": "overrides=[{{'strategy': 'chunks={value}'}}]",
    "save": "memory_budget=0 for save='shard', memory_budget=None for save='gathered'",
    "on_miss": "on_unmatched={value}",
    "tune": "autotune={value}",
    "fp8_recipe": "fp8={{'recipe': {value}}}",
    "fp8_weights": "fp8={{'weights': 'cached'}} for 'kept', fp8={{'weights': 'per_call'}} for 'call'",
    "fp8_state": "fp8={{'state': {value}}}",
    "fp8_filter": "fp8={{'filter': {value}}}",
    "fp8_reduce_scatter": "fp8={{'reduce_scatter': {value}}}",
    "timeout_s": "ub_overlap.configure(step_timeout_s={value}), or UB_OVERLAP_STEP_TIMEOUT_S",
    "snapshots": "ub_overlap.configure(snapshots={value}), or UB_OVERLAP_SNAPSHOTS",
    "merge_collectives": "ub_overlap.configure(merge_collectives={value}), or UB_OVERLAP_MERGE_COLLECTIVES",
}
"""Options of earlier versions -> their new spelling."""


def parse(options: Mapping[str, Any] | None, inductor_names: frozenset[str]) -> tuple[Options, dict[str, Any]]:
    """Return (our options, Inductor's options) of a user's dict. OptionError names the option, its value and valid values."""
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    for name, value in (options or {}).items():
        if name in NAMES:
            ours[name] = value
        elif name not in RENAMED and name.replace("-", "_") in inductor_names:
            theirs[name] = value
        else:
            raise _unknown(name, value, inductor_names)
    parsed = Options(**ours)
    if parsed.inner == "aot_eager" and (theirs or parsed.mode):
        raise _refused("inner", "aot_eager", "no options or mode of Inductor with it", "drop them, or use inner='inductor'")
    if disabled := disabled_sites():
        ours["overrides"] = parsed.overrides + Overrides(patterns=tuple((pattern, "none") for pattern in disabled))
        parsed = Options(**ours)
    return parsed, theirs


def options(**values: Unpack[OptionValues]) -> dict[str, Any]:
    """Return options as the dict that torch.compile takes. Type checkers know their names and values.

        torch.compile(model, backend="ub_overlap", options=ub_overlap.options(overlap="force", min_bytes=0))

    torch.compile takes a dict of any names, in which a typo shows at the first call of the model. Options of Inductor are
    added to the result: `ub_overlap.options(overlap="force") | {"max_autotune": True}`. OptionError for an unknown name or an
    invalid value.
    """
    given: dict[str, Any] = {**values}
    parse(given, compat.inductor_option_names())
    return given


def disabled_sites() -> tuple[str, ...]:
    """Return the site patterns of UB_OVERLAP_DISABLE, e.g. "forward.3,backward.*". They win over all overrides."""
    return tuple(filter(None, os.environ.get("UB_OVERLAP_DISABLE", "").replace(" ", "").split(",")))


def describe_options() -> list[tuple[str, str, str]]:
    """Return (option, allowed values with the default first, meaning) of each option."""
    return describe_fields(Options)


def options_table() -> str:
    """Return the table of options in Markdown."""
    return markdown_table(("option", "values", "meaning"), [(f"`{name}`", *rest) for name, *rest in describe_options()])


def _unknown(name: str, value: Any, inductor_names: frozenset[str]) -> OptionError:
    where, got = "torch.compile(..., options=...)", f"{name}={value!r}"
    if name in RENAMED:
        spelling = RENAMED[name].format(value=repr(value) if name != "chunks" else value)
        return OptionError(f"option {name!r} was renamed", where=where, got=got, expected=spelling, fix=f"use {spelling}")
    near = difflib.get_close_matches(name, [*NAMES, *inductor_names], n=3)
    return OptionError(
        what=f"unknown option {name!r}",
        where=where,
        got=got,
        expected=f"one of {', '.join(NAMES)}, or an option of torch._inductor.config",
        fix=f"did you mean {' or '.join(near)}?" if near else "remove it",
    )


def _refused(name: str, value: Any, expected: str, fix: str = "") -> OptionError:
    return OptionError(
        what=f"bad value of option {name!r}",
        where="torch.compile(..., options=...)",
        got=f"{name}={value!r}",
        expected=expected,
        fix=fix or f"set {name} to {expected}",
    )
