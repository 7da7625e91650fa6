"""Graphs of models compiled under DistributedDataParallel: DDP(compile(m)) and compile(DDP(m)).

Dynamo's default there is DDPOptimizer. It splits a graph at the borders of gradient buckets before a backend sees it. A border
between an all_gather and its matmul separates the two, and DTensor graphs fail altogether in torch 2.13. A backend cannot
prevent either; this switch can.
"""

from __future__ import annotations

from typing import Literal, get_args

from ub_overlap import _torch_compat as compat
from ub_overlap.runtime.errors import OptionError

DDPGraphs = Literal["no_optimization", "ddp_optimizer", "python_reducer"]


def optimize_ddp(mode: DDPGraphs) -> None:
    """Set torch._dynamo.config.optimize_ddp for this process. Call it before DistributedDataParallel wraps the model.

    "no_optimization": graphs are not split, and gradients are averaged after backward. "ddp_optimizer": torch's default.
    "python_reducer": compiled autograd, which is switched on, traces the averaging into backward. OptionError for others.
    """
    if mode not in get_args(DDPGraphs):
        raise OptionError(f"unknown mode of optimize_ddp {mode!r}", expected=f"one of {', '.join(get_args(DDPGraphs))}")
    compat.dynamo_config.optimize_ddp = mode
    if mode == "python_reducer":
        compat.dynamo_config.compiled_autograd = True
