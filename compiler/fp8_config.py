"""options={"fp8": ...}: which matmuls of linears are computed in float8, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from ub_overlap.runtime.errors import OptionError
from ub_overlap.runtime.typed_fields import Check, check_values, describe_fields, optional, typed_field

from .fp8.recipe import RecipeName

Products = Literal["all", "forward", "off"]


def _checked_name(value: Any) -> str:
    if not isinstance(value, str) or ";" in value:
        raise ValueError
    return value


def _checked_function(value: Any) -> Any:
    if not callable(value):
        raise ValueError
    return value


_FILTER = optional(Check("a function of (module path, (out, in)) that returns True for float8", _checked_function))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Config:
    """Float8 of linears. OptionError for an invalid value."""

    products: Products = typed_field(
        "all", '"forward": matmuls of the forward; "all": those of gradients too; "off": only matmuls that are float8 already'
    )
    recipe: RecipeName = typed_field(
        "tensorwise", "scaling granularity, and whether scales come from current values or from amax history"
    )
    weights: Literal["cached", "per_call"] = typed_field(
        "cached", "cast a weight again where it has changed (once per step, one byte per parameter), or in every call"
    )
    state: str = typed_field(
        "",
        "name of the amax history of `delayed`: models with the same module paths in one process need two names",
        Check('a name without ";"', _checked_name),
        '`""`, a name',
    )
    filter: Callable[[str, tuple[int, int]], bool] | None = typed_field(
        None,
        "(module path, local (out, in) of the weight) -> whether the linear is float8. Without an attribute `key`, a text that "
        "identifies the function, compile caches are off",
        _FILTER,
        "`None`, a function",
    )
    reduce_scatter: bool = typed_field(
        False, "reduce_scatter the results of float8 matmuls in float8, with one scale per 128 columns of a row"
    )

    def __post_init__(self) -> None:
        check_values(Fp8Config, {f.name: getattr(self, f.name) for f in fields(self)}, _refused)

    @property
    def is_on(self) -> bool:
        """Whether linears are to be computed in float8."""
        return self.products != "off"

    @property
    def filter_key(self) -> str | None:
        """The text that identifies `filter`: "" without a filter, None for a filter without a key."""
        if self.filter is None:
            return ""
        key = getattr(self.filter, "key", None)
        return key if isinstance(key, str) else None

    def key(self) -> str:
        """Return a text of all that graphs depend on."""
        return repr([(f.name, getattr(self, f.name)) for f in fields(self) if f.name != "filter"] + [self.filter_key])


def parse_fp8(value: Any) -> Fp8Config:
    """Return the config of any form of the option: a text (the products), a dict, an Fp8Config, or None (off)."""
    if isinstance(value, Fp8Config):
        return value
    if value is None:
        return Fp8Config(products="off")
    if isinstance(value, str) and value in get_args(Products):
        return Fp8Config(products=value)  # type: ignore[arg-type]
    if not isinstance(value, Mapping):
        raise ValueError
    names = [f.name for f in fields(Fp8Config)]
    for name in value:
        if name not in names:
            raise OptionError(
                what=f"unknown field {name!r} of option 'fp8'",
                where="torch.compile(..., options=...)",
                got=f"fp8.{name}={value[name]!r}",
                expected=f"one of {', '.join(names)}",
            )
    return Fp8Config(**value)


def describe_fp8() -> list[tuple[str, str, str]]:
    """Return (field, allowed values with the default first, meaning) of each field of the config."""
    return describe_fields(Fp8Config)


def _refused(name: str, value: Any, expected: str) -> OptionError:
    return OptionError(
        what=f"bad value of option 'fp8', field {name!r}",
        where="torch.compile(..., options=...)",
        got=f"fp8.{name}={value!r}",
        expected=expected,
    )
