"""The phase of a graph: which part of a training step it computes. This file imports no torch."""

from __future__ import annotations

from typing import Literal, get_args

Phase = Literal["forward", "backward", "step"]
"""forward: also inference. step: forward, loss and backward in one graph."""

PHASES: tuple[str, ...] = get_args(Phase)
"""In the order of reports."""
