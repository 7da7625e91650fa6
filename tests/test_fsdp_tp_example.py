"""examples/fsdp_tp: both forms of ZeRO-3, with and without tensor parallelism, equal training on one process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.programs import run_program

pytestmark = pytest.mark.tier("test")

EXAMPLE = Path(__file__).resolve().parents[1] / "examples/fsdp_tp/train.py"
SMALL = ["--device", "cpu", "--inner", "aot_eager", "--steps", "3", "--seq", "32", "--dim", "64", "--layers", "1", "--check"]


def train(ranks: int, *arguments: str) -> tuple[str, list[float]]:
    """Run the example on CPU ranks. Return its output and its losses."""
    finished = run_program(ranks, EXAMPLE, [*SMALL, *arguments])
    assert finished.code == 0, finished.tail()
    assert "the losses agree" in finished.output
    return finished.output, [float(text) for text in re.findall(r"step \d+: loss ([\d.]+)", finished.output)]


@pytest.mark.tier("full")
@pytest.mark.timeout(420)
def test_forms_go_on_from_one_checkpoint(tmp_path: Path) -> None:
    """Gathered in the graph over 2 ranks, then fully_shard x tensor parallelism over 4, which goes on with lower losses."""
    folder = str(tmp_path / "checkpoint")
    output, first = train(2, "--accumulate", "2", "--checkpoint", folder)
    # 12 parameters are gathered, those of matmuls in backward again, and all gradients are reduced.
    assert re.search(r"forward\.\d+ +all_gather .* split ", output) and re.search(
        r"backward\.\d+ +reduce_scatter .* split ", output
    )
    assert len(re.findall(r"^forward\.\d+ +all_gather ", output, re.M)) == 12
    assert len(re.findall(r"^backward\.\d+ +reduce_scatter ", output, re.M)) == 12
    output, later = train(4, "--tp", "2", "--form", "fsdp2", "--checkpoint", folder)
    assert "went on from" in output and "/fsdp.layers.0.all_gather: 6 calls over our transport" in output
    assert max(later) < max(first)


def test_bad_arguments() -> None:
    finished = run_program(1, EXAMPLE, ["--tp", "3"])
    assert finished.code == 2 and "--tp 3: 1 ranks must be 2 or more replicas of as many" in finished.output
