"""examples/recovery: after a rank was killed, a compiled model goes on, and its losses are those of a run without a fault."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.gpu.launch import launch, torchrun

pytestmark = pytest.mark.tier("test")

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples/recovery/shrink.py"
STEPS, KILLED = 5, 3


def losses_without_fault() -> list[float]:
    """Return the losses of the same training on one process, eager."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        batch = torch.randn(12, 48, generator=torch.Generator().manual_seed(step))
        loss = (model(batch) - batch.flip(-1)).square().sum() / batch.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check(output: str, ranks: int) -> None:
    """All ranks of the last attempt print the losses from the killed step on."""
    done = [ast.literal_eval(text) for text in re.findall(r"done (\[.*\])", output)]
    assert len(done) == ranks, output
    for losses in done:
        assert losses == pytest.approx(losses_without_fault()[KILLED:], rel=1e-4), output
    counts = re.findall(r"(\d+) of (\d+) collectives overlapped", output)
    assert counts and all(int(overlapped) == int(all_) > 0 for overlapped, all_ in counts), output


RANKS = [(["--ranks", "3"], "0, 1"), (["--ranks", "2", "--spares", "1"], "0, 2")]


@pytest.mark.tier("full")
@pytest.mark.parametrize(("flags", "members"), RANKS)
def test_in_process(flags: list[str], members: str) -> None:
    """The survivors go on alone, on fewer ranks, or with a spare process. Their errors name the killed rank."""
    finished = launch([sys.executable, str(EXAMPLE), "--steps", str(STEPS), "--kill-at", str(KILLED), *flags], 240)
    assert finished.code == 0, finished.tail()
    victim = int(flags[1]) - 1
    failed = re.findall(r"attempt 0 .* failed (.*)", finished.output)
    assert len(failed) == victim, finished.output
    assert all(f"PeerTimeoutError: rank {victim} of the group is gone" in text for text in failed), failed
    check(finished.output, 2)
    assert [f"process {n}: done" in finished.output for n in (0, 1, 2)] == [str(n) in members for n in (0, 1, 2)]


@pytest.mark.tier("full")
def test_elastic_restart(tmp_path: Path) -> None:
    finished = launch(
        [*torchrun(2), "--max-restarts=1", str(EXAMPLE.with_name("elastic.py")), "--folder", str(tmp_path / "new")], 240
    )
    assert finished.code == 0, finished.tail()
    assert "start 1: done" in finished.output
    check(finished.output, 1)
