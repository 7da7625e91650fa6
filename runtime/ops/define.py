"""Registration of ops that are written in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("ub_overlap", "FRAGMENT")


def define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any] | None) -> None:
    """Register `kernel` for all devices and `fake` for shapes. An op without a fake is not called from graphs."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,) if fake else ())
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    if fake is not None:
        torch.library.register_fake(f"ub_overlap::{name}", fake, lib=_LIBRARY)
