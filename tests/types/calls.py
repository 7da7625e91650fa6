"""Calls of the public API that a type checker accepts, and calls that it rejects: lines that end in "# error".

This file is checked and never run.
"""

from __future__ import annotations

from typing import Any, assert_type

import torch
from torch import Tensor

import ub_overlap


def results_have_types(x: Tensor, both: list[Tensor], later: bool) -> None:
    assert_type(ub_overlap.all_gather(x), Tensor)
    assert_type(ub_overlap.all_gather(both), list[Tensor])
    assert_type(ub_overlap.all_gather(x, async_op=True), ub_overlap.CollectiveHandle[Tensor])
    assert_type(ub_overlap.all_gather(x, async_op=True).wait(), Tensor)
    assert_type(ub_overlap.reduce_scatter(both, reduce_op="avg", async_op=True).wait(), list[Tensor])
    assert_type(ub_overlap.reduce_scatter(full=x), Tensor)
    assert_type(ub_overlap.all_reduce(x, out_dtype=torch.float32), Tensor)
    assert_type(ub_overlap.all_reduce(x, async_op=True).wait(), Tensor)
    assert_type(ub_overlap.all_to_all(x, [1, 2], async_op=True).wait(), Tensor)
    assert_type(ub_overlap.all_gather_matmul(x, x), Tensor)
    assert_type(ub_overlap.all_gather_matmul(x, both), list[Tensor])
    assert_type(ub_overlap.all_gather_matmul(x, both, return_gathered=True), tuple[Tensor, list[Tensor]])
    assert_type(ub_overlap.matmul_reduce_scatter(x, x), Tensor)
    ub_overlap.all_gather(x, async_op=later)
    ub_overlap.all_gather(x, async_opp=True)  # error
    ub_overlap.all_gather(x, async_op=True).sum()  # error
    ub_overlap.all_reduce(x).wait()  # error
    ub_overlap.all_to_all([x])  # error


def options_have_names_and_values(model: torch.nn.Module) -> None:
    torch.compile(model, backend="ub_overlap", options=ub_overlap.options(overlap="force", fp8={"recipe": "rowwise"}))
    assert_type(ub_overlap.options(overrides=[{"kind": "all_reduce", "strategy": "split"}], min_bytes=0), dict[str, Any])
    ub_overlap.options(overrides={"forward.0": "split"}, memory_budget=None, reduce_dtype=torch.bfloat16)
    ub_overlap.passes(ub_overlap.options(autotune=True) | {"max_autotune": True})
    ub_overlap.options(overlp="force")  # error
    ub_overlap.options(overlap="always")  # error
    ub_overlap.options(min_bytes="1")  # error


def settings_have_names_and_values() -> None:
    assert_type(ub_overlap.configure(step_timeout_s=10, links="any"), ub_overlap.Settings)
    ub_overlap.configure(step_timeout=10)  # error
    ub_overlap.configure(links="pcie")  # error
