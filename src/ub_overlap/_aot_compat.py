"""What AOTAutograd notes about a graph and its compilation, beyond names (`_torch_compat.py`)."""

from __future__ import annotations

from typing import Any

from ub_overlap import _torch_compat


def gradient_of(desc: Any) -> int | None:
    """Return the index of the input of Dynamo's graph whose gradient an output is, or whose DTensor's; else None.

    `desc`: of an output of a backward graph.
    """
    while (base := getattr(desc, "base", None)) is not None:
        desc = base
    return getattr(getattr(desc, "grad_of", None), "idx", None)


def drop_donated_inputs() -> None:
    """Let no backward graph of the current compilation reuse the memory of saved tensors."""
    context = _torch_compat.TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []
