"""Rank functions of test_hybrid_sharding.py: examples/fsdp_tp on ranks of a pool."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import ub_overlap
from ub_overlap._torch_compat import caches_off
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.compiler.reports.report import Report

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/fsdp_tp/train.py"


def example() -> Any:
    """Return the module of the example, which is a program and not a package."""
    if str(EXAMPLE.parent) not in sys.path:
        sys.path.append(str(EXAMPLE.parent))
    spec = importlib.util.spec_from_file_location("fsdp_tp_train", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(rank: int, world: int, arguments: list[str]) -> dict[str, Any]:
    """Run the example with --check. Return its exit code, what it compares, its decisions, and calls by site."""
    program = example()
    mark, output = HISTORY.mark(), io.StringIO()
    with caches_off(), mock.patch.dict(os.environ, WORLD_SIZE=str(world)), contextlib.redirect_stdout(output):
        code = program.train(program.parse([*arguments, "--check"]))
    error = re.search(r"gradients of the first step: error (\S+)", output.getvalue())
    return {
        "code": code,
        "gradient_error": float(error[1]) if error else None,  # rank 0 prints
        "decisions": [d.to_dict() for d in Report(HISTORY.since(mark)).decisions],
        "calls": {site: stats.calls for site, stats in ub_overlap.site_stats().items() if site.startswith("/fsdp")},
        "output": output.getvalue(),
    }
