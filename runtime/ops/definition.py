"""What every op file of this folder provides, and how it is registered with torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ub_overlap import _torch_compat as compat

LIBRARY = torch.library.Library("ub_overlap", "FRAGMENT")
TAGS = (torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag)

Args = TypeVar("Args")


@dataclass(frozen=True, slots=True)
class OpDefinition(Generic[Args]):
    """One op of `torch.ops.ub_overlap`. C++ implements it (csrc/bindings/ops/); this is all of it that Python knows."""

    schema: str
    arguments: type[Args]
    """A named tuple with the schema's arguments, in order. `fake` and `fallback` both take it."""
    fake: Callable[[Args], Any]
    """Computes sizes, dtypes and strides of the results."""
    fallback: Callable[[Args], Any] | None = None
    """Computes the op by plain c10d collectives and matmuls: for strategy "none" and for groups without a transport. None where
    C++ does so."""
    flops: Callable[[Args], Any] | None = None
    """Counts the operations of its matmuls. None for ops without any: Inductor's scheduler takes an op that counts for one
    that computes."""

    @property
    def name(self) -> str:
        return self.schema.partition("(")[0]

    @property
    def overload(self) -> Any:
        """The registered op."""
        return getattr(torch.ops.ub_overlap, self.name).default

    @property
    def flat_overload(self) -> Any | None:
        """The registered op `<name>_flat`, which returns all results in one list. None if no result of several is a list.

        Inductor's C++ wrapper (`cpp_wrapper=True`) calls it: a list among several results has no code there.
        """
        flat = getattr(torch.ops.ub_overlap, f"{self.name}_flat", None)
        return None if flat is None else flat.default

    def bind(self, *args: Any, **kwargs: Any) -> Args:
        """Return the arguments of a call by name. Fakes of torch 2.11 get the elements of ScalarType[] as integers."""
        bound: Any = self.arguments(*args, **kwargs)
        dtype_lists = re.findall(r"ScalarType\[\] (\w+)", self.schema)
        return bound._replace(**{name: compat.dtypes(getattr(bound, name)) for name in dtype_lists}) if dtype_lists else bound

    def register(self) -> None:
        """Define the op and its fake. The kernels register themselves when the extension is loaded."""
        LIBRARY.define(self.schema, tags=TAGS)

        def fake(*args: Any, **kwargs: Any) -> Any:
            return self.fake(self.bind(*args, **kwargs))

        torch.library.register_fake(f"ub_overlap::{self.name}", fake, lib=LIBRARY)
        self._count_flops_of(self.name)
        arguments, _, results = self.schema.removeprefix(self.name).partition(" -> ")
        if "Tensor[]" in results and results != "Tensor[]":
            flat = f"{self.name}_flat"
            LIBRARY.define(f"{flat}{arguments} -> Tensor[]", tags=TAGS)
            LIBRARY.impl(flat, lambda *args: _flatten(self.overload(*args)), "CompositeExplicitAutograd")
            torch.library.register_fake(f"ub_overlap::{flat}", lambda *args: _flatten(fake(*args)), lib=LIBRARY)
            self._count_flops_of(flat)

    def _count_flops_of(self, name: str) -> None:
        if (count := self.flops) is not None:
            known = set(getattr(self.arguments, "_fields", ()))

            def formula(*args: Any, **kwargs: Any) -> Any:  # torch adds out_val and, from 2.13 on, _node_meta
                return count(self.arguments(*args, **{k: v for k, v in kwargs.items() if k in known}))

            register_flop_formula(getattr(torch.ops.ub_overlap, name), get_raw=True)(formula)


def define_python_op(
    schema: str, kernel: Callable[..., Any], fake: Callable[..., Any] | None, tags: Sequence[torch.Tag] = ()
) -> None:
    """Define an op whose kernel is written in Python, for all devices. An op without a fake is not called from graphs."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags) if fake is not None else tuple(tags))
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    if fake is not None:
        torch.library.register_fake(f"ub_overlap::{name}", fake, lib=LIBRARY)


def _flatten(results: Sequence[Any]) -> list[Tensor]:
    """Return tensors and lists of tensors as one list."""
    return [tensor for result in results for tensor in (result if isinstance(result, list | tuple) else (result,))]
