"""examples/context_parallel: both forms that run on CPUs train as on the whole sequence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.programs import run_program

pytestmark = pytest.mark.tier("test")

EXAMPLE = Path(__file__).resolve().parents[1] / "examples/context_parallel/train.py"
SMALL = ["--device", "cpu", "--inner", "aot_eager", "--steps", "3", "--seq", "32", "--dim", "64", "--layers", "1", "--check"]


FORMS = [("gathered", {"all_gather": 2, "reduce_scatter": 2}), ("ulysses", {"all_to_all": 8})]


@pytest.mark.tier("full")
@pytest.mark.parametrize(("form", "exchanges"), FORMS)
def test_losses_agree(form: str, exchanges: dict[str, int]) -> None:
    finished = run_program(2, EXAMPLE, [*SMALL, "--form", form])
    assert finished.code == 0, finished.tail()
    assert "the losses agree" in finished.output
    for kind, count in exchanges.items():
        assert len(re.findall(rf"^(?:forward|backward)\.\d+ +{kind} .* split ", finished.output, re.M)) == count, (
            finished.output
        )


def test_bad_arguments() -> None:
    finished = run_program(1, EXAMPLE)
    assert finished.code == 2 and "start 2 or more ranks with torchrun" in finished.output
