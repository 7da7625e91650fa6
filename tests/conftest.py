"""Shared test setup: pools of ranks, hypothesis settings, and a report store separate from the user's."""

from __future__ import annotations

import os
import sys
import tempfile
import zlib
from importlib.metadata import version
from pathlib import Path

# Read when torch is imported, here and in all processes of tests.
# A graph out of Inductor's cache makes no plan. With it, what a test compiles depends on the tests and the runs before it. A
# test of caches turns it on.
os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE_DEFAULT", "0")
# Two processes of pytest and their ranks share the cores. Processes that compile for Inductor would each import torch first.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("COLUMNS", None)  # a terminal's width must not decide what tests read
if sys.platform == "linux":
    os.environ.setdefault("CXX", str(Path(__file__).parent / "harness/bin/g++"))
# Kernels that Inductor has compiled live between runs, by torch, how they are compiled, and their sources: g++ takes 2 to 4 s.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR",
    os.path.join(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache",
        "ub_overlap_tests",
        f"torch-{version('torch')}-{zlib.crc32((Path(__file__).parent / 'harness/bin/g++').read_bytes()):x}",
    ),
)

import pytest
from hypothesis import settings

import tests.harness.shared_memory  # noqa: F401  (tags the segments of this process and of all that it starts)
from tests.harness import tier_hooks
from tests.harness.fixtures import (  # noqa: F401  (fixtures, found by name)
    fake2,
    fake4,
    hf2,
    hf4,
    pool2,
    pool3,
    pool4,
)
from tests.harness.tier_hooks import (  # noqa: F401  (hooks and a fixture, found by name)
    pytest_collection_modifyitems,
    pytest_terminal_summary,
    starts_no_process,
)
from tests.harness.workers import pytest_xdist_make_scheduler  # noqa: F401  (a hook, found by name)

# Tests store reports in a separate folder, which ranks and subprocesses inherit. The ranks of torchrun share one folder.
if "RANK" not in os.environ:
    _STORE = tempfile.TemporaryDirectory(prefix="ub_overlap_tests_")
    os.environ["UB_OVERLAP_CACHE_DIR"] = _STORE.name
elif "UB_OVERLAP_CACHE_DIR" not in os.environ:  # started by hand, not by tests/gpu/launch.py
    _run = "_".join(os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_PORT"))
    os.environ["UB_OVERLAP_CACHE_DIR"] = str(
        Path(tempfile.gettempdir()) / f"ub_overlap_tests_{os.getuid()}_{_run}_{os.getppid()}"
    )

# derandomize: every CI run uses the same examples. deadline: two shared cores are too slow for a per-example limit.
settings.register_profile("ub_overlap", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ub_overlap")


def pytest_configure(config: pytest.Config) -> None:
    tier_hooks.configure(config)
    config.addinivalue_line("markers", "gpu: runs on GPUs, and skips with a reason where there are too few")
    config.addinivalue_line("markers", "soak: half a minute of a program of tests/soak")
    config.addinivalue_line("markers", "full: left out with --quick")
    config.addinivalue_line("markers", "deadline(seconds): limit of a test under torchrun (tests/gpu/torchrun)")
    config.addinivalue_line("markers", "own_gpus(why): needs a GPU of its own for each rank (tests/gpu/torchrun)")


def pytest_addoption(parser: pytest.Parser) -> None:
    tier_hooks.add_options(parser)
    parser.addoption("--device", choices=("cuda", "cpu"), default="cuda", help="device of the tests under torchrun")
    parser.addoption("--quick", action="store_true", help="fewer GPU tests, fewer iterations")
