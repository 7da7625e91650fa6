"""The test modules of tests/gpu/torchrun, each under torchrun with a hard limit.

    pytest tests/gpu/test_torchrun.py tests/gpu/test_faults.py tests/gpu/test_sanitizer.py -m gpu --quick -rA

All modules run on GPUs. A selection runs on CPU ranks as a smoke test. The most informative modules run first, for short
machine time.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.gpu.launch import ENVIRONMENT, Finished, launch, pytest_arguments, torchrun_command
from tests.harness.programs import run_program

pytestmark = pytest.mark.tier("full")


@dataclass(frozen=True)
class Module:
    """A test module. `limit_s`, `quick_s`: its limit without and with --quick. `env`: extra environment variables."""

    name: str
    limit_s: float
    quick_s: float
    env: tuple[tuple[str, str], ...] = ()


MODULES = (
    Module("ops", 400, 150),
    Module("races", 300, 120),
    Module("broken_schedules", 300, 120),
    Module("numerics", 240, 100),
    Module("cached_weights", 240, 120),
    Module("float8_packs", 240, 150),
    Module("float8_weights", 150, 120),
    Module("delayed_scaling", 240, 120),
    Module("functions", 200, 120),
    Module("data_parallel", 200, 120),
    Module("graphs", 300, 120),
    Module("split", 300, 150),
    Module("buckets", 150, 100),
    Module("zero_copy", 300, 150),
    Module("coalesced", 150, 80),
    Module("all_to_all", 240, 120),
    Module("abandoned", 150, 80),
    Module("context_parallel", 400, 200),
    Module("expert_parallel", 300, 180),
    Module("parallel_programs", 150, 120),
    Module("fused", 400, 280),
    Module("generate", 600, 300),
    Module("recorded", 150, 80),
    Module("hosts", 150, 80),
    Module("host_gloo", 150, 100),
    Module("point_to_point", 150, 80, (("CUDA_DEVICE_MAX_CONNECTIONS", "32"),)),  # a stream for each of 2 (ranks - 1) channels
    Module("pipeline_stage", 240, 180),
    Module("dispatch", 300, 150),
    Module("mirror", 150, 90),
    Module("tools", 200, 120),
    Module("models", 800, 200),
    *(Module("connections", 150, 100, (("CUDA_DEVICE_MAX_CONNECTIONS", n),)) for n in ("1", "8", "32")),
)


def keep_log(name: str, finished: Finished) -> None:
    """Write the output to the folder UB_OVERLAP_TEST_LOG, if it is set."""
    if folder := os.environ.get("UB_OVERLAP_TEST_LOG"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, f"{name}.log").write_text(f"{finished.why()}\n{finished.output}\n")


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("module", MODULES, ids=lambda m: "-".join((m.name, *(value for _, value in m.env))))
def test_on_gpus(ranks: int, module: Module, request: pytest.FixtureRequest) -> None:
    quick = request.config.getoption("--quick")
    command = torchrun_command(f"test_{module.name}.py", ranks, ["--quick"] if quick else [])
    finished = launch(command, module.quick_s if quick else module.limit_s, dict(module.env))
    keep_log("-".join((module.name, *(value for _, value in module.env))), finished)
    print(finished.tail())
    assert finished.code == 0, f"{finished.why()}\n{finished.output[-6000:]}"


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("module", "selection"),
    [
        ("ops", "pipelined and bfloat16"),
        ("races", "mixed"),
        ("broken_schedules", "AG2"),
        ("numerics", "scatter"),
        ("recorded", "RS"),
        ("hosts", "random_orders and 40"),
        ("mirror", "every_op and 4"),
        ("host_gloo", "moved or reduced"),
        ("float8_packs", "siblings"),
    ],
)
def test_on_cpu_ranks(module: str, selection: str) -> None:
    """These tests themselves, on every machine."""
    arguments = pytest_arguments(f"test_{module}.py", ["--device", "cpu", "--quick", "-k", selection])
    finished = run_program(2, "pytest", arguments, ENVIRONMENT, limit_s=150, only_rank_0=True)
    assert finished.code == 0, f"{finished.why()}\n{finished.output[-6000:]}"
    assert " passed" in finished.output and " failed" not in finished.output


def test_every_module_is_run() -> None:
    """The others are run by test_matmul_algorithms.py and test_sanitizer.py."""
    files = {path.stem.removeprefix("test_") for path in (Path(__file__).parent / "torchrun").glob("test_*.py")}
    assert {name for name in files if "fails_alone" not in name} == {m.name for m in MODULES} | {"algorithms", "kernels"}


FAILS_ALONE = """
import pytest
from tests.gpu.lockstep import Lockstep

def test_fails_on_rank_1(lockstep: Lockstep) -> None:
    assert lockstep.rank == 0, "only rank 1"

def test_goes_on(lockstep: Lockstep, group: str) -> None:
    assert sum(lockstep.gather(1)) == 2
"""


@pytest.mark.timeout(150)
def test_a_failure_of_one_rank_fails_all_and_names_it() -> None:
    path = Path(__file__).parent / "torchrun" / f"test_fails_alone_{os.getpid()}.py"
    path.write_text(FAILS_ALONE)
    try:
        finished = launch(torchrun_command(path.name, 2, ["--device", "cpu"]), 120)
    finally:
        path.unlink()
    assert finished.code == 1, finished.output[-6000:]
    assert "rank 1: AssertionError: only rank 1" in finished.output
    assert "1 failed, 1 passed" in finished.output


@pytest.mark.timeout(60)
def test_a_process_that_hangs_is_killed() -> None:
    finished = launch(["sh", "-c", "sleep 1000 & sleep 1000"], limit_s=1)
    assert finished.code is None and finished.seconds < 20
