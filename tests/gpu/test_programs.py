"""The programs of this folder on GPUs, each as a test with a hard limit; its table is the failure's text."""

from __future__ import annotations

import pytest

from tests.gpu.run_all import PROGRAMS, Program, start


@pytest.mark.gpu
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_program(ranks: int, program: Program) -> None:
    done = start(program, ranks, quick=False, device="cuda")
    assert done.code == 0, f"{done.command}: {done.why()}\n{done.tail()}\n{done.output[-6000:]}"
