"""What every op file of this folder provides, and how it is registered with torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

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
    fallback: Callable[[Args], Any]
    """Computes the op by plain c10d collectives and matmuls: for strategy "none" and for groups without a transport."""

    @property
    def name(self) -> str:
        return self.schema.partition("(")[0]

    def register(self) -> None:
        """Define the op and its fake. The kernels register themselves when the extension is loaded."""
        LIBRARY.define(self.schema, tags=TAGS)
        torch.library.register_fake(
            f"ub_overlap::{self.name}", lambda *args, **kwargs: self.fake(self.arguments(*args, **kwargs)), lib=LIBRARY
        )


def define_python_op(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any] | None) -> None:
    """Define an op whose kernel is written in Python, for all devices. An op without a fake is not called from graphs."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,) if fake is not None else ())
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    if fake is not None:
        torch.library.register_fake(f"ub_overlap::{name}", fake, lib=LIBRARY)
