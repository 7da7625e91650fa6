"""Elementwise readers of zero-copy gathers under Inductor: stored in front of the release, alone and in buckets."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from tests.harness.fake_ranks import FakeRanks
from tests.harness.ranks import RankPool
from tests.models.compare import uncached

WIDTH = 1024
DELAY_S = 0.3
OPS = torch.ops.ub_overlap
OPTIONS: dict[str, Any] = {"profile": "h200", "min_bytes": 0, "memory_budget": 0, "zero_copy": "auto"}
SINGLE = {**OPTIONS, "overrides": [{"strategy": "split"}]}


class Layer(nn.Module):
    """A product with this rank's shard of a weight, gathered and then cast, or passed through tanh. [M, D] -> the same."""

    def __init__(self, rank: int, world: int, form: str) -> None:
        super().__init__()
        self.shard, self.form = nn.Parameter((torch.randn(WIDTH, WIDTH) / 8).chunk(world)[rank].clone()), form

    def forward(self, x: Tensor) -> Tensor:
        weight = funcol.all_gather_tensor_autograd(self.shard, 0, dist.group.WORLD)
        if self.form == "cast":
            return x + (x.bfloat16() @ weight.to(torch.bfloat16)).float() / 32
        return x + x @ weight.tanh() / 32


def train(rank: int, world: int, form: str, options: dict[str, Any]) -> tuple[list[list[str]], list[float]]:
    """Return the programs with releases, and the error of two steps' outputs against eager code.

    Rank 0 waits behind each release of the second step, before which all weights change. So peers overwrite what it released.
    """
    torch.manual_seed(3)
    model = nn.Sequential(*(Layer(rank, world, form) for _ in range(4)))
    x = torch.randn(1024, WIDTH, generator=torch.Generator().manual_seed(rank))
    compiled, errors = torch.compile(model, backend="ub_overlap", options=options), []

    def step() -> None:
        model.zero_grad()
        output = compiled(x)
        output.square().mean().backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        truth = model(x)
        truth.square().mean().backward()
        pairs = [(output, truth), *zip(gradients, (p.grad for p in model.parameters() if p.grad is not None), strict=True)]
        errors.append(max(float((a - b).norm() / b.norm()) for a, b in pairs))

    with uncached(), pytest.MonkeyPatch.context() as patch:
        _, programs = run_and_get_code(step)
        for op in (OPS.release_collective, OPS.release_coalesced):
            patch.setattr(op, "default", late(op.default) if rank == 0 else op.default)
        with torch.no_grad():
            for p in model.parameters():
                p.neg_()
        step()
    return calls_of(programs), errors


def code_of(rank: int, world: int, form: str, options: dict[str, Any]) -> list[list[str]]:
    """Return the programs with releases of one step."""
    model = nn.Sequential(*(Layer(rank, world, form) for _ in range(4)))
    compiled = torch.compile(model, backend="ub_overlap", options=options)
    with uncached():
        _, programs = run_and_get_code(lambda: compiled(torch.randn(1024, WIDTH)).square().mean().backward())
    return calls_of(programs)


def calls_of(programs: list[str]) -> list[list[str]]:
    return [text[text.index("def call(") :].splitlines() for text in programs if "release_co" in text]


def late(op: Any) -> Any:
    def call(*args: Any) -> None:
        op(*args)
        time.sleep(DELAY_S)

    return call


@pytest.mark.tier("full")
@pytest.mark.parametrize("form", ["cast", "tanh"])
@pytest.mark.parametrize(("options", "release"), [(SINGLE, "release_collective"), (OPTIONS, "release_coalesced")])
def test_readers_precede_the_release(pool2: RankPool, form: str, options: dict[str, Any], release: str) -> None:
    """Nothing names released memory in the generated code, and values are those of eager code where a peer is ahead."""
    for programs, errors in pool2.run(train, form, options, timeout=300):
        check_code(programs, release)
        assert max(errors) < 2e-2, errors


@pytest.mark.tier("test")
def test_the_code_reads_before_the_release(fake2: FakeRanks) -> None:
    check_code(fake2.run(code_of, "cast", OPTIONS)[0], "release_coalesced")


def check_code(programs: list[list[str]], release: str) -> None:
    """Nothing reads a buffer after its release."""
    released = [
        (lines, number, re.findall(r"buf\d+", m[1]))
        for lines in programs
        for number, line in enumerate(lines)
        if (m := re.search(rf"{release}\.default\((\[.*?\]|buf\d+)", line))
    ]
    assert sum(len(names) for _, _, names in released) > 1
    for lines, number, names in released:
        readers = [line for line in lines[number + 1 :] if any(re.search(rf"\b{name}\b", line) for name in names)]
        assert not [line for line in readers if not re.fullmatch(r"\s*del \w+", line)], readers
