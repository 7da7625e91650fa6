"""`ub_overlap.enable`: torch.compile's backend "inductor" with overlap, for programs that cannot name another."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

import ub_overlap
from tests.harness.fake_ranks import FakeRanks
from tests.harness.ranks import RankPool
from tests.models.compare import uncached
from ub_overlap import _enable as module
from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.plan.strategy import NONE
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.runtime.errors import OptionError


@pytest.fixture(autouse=True)
def _plain_afterwards() -> Iterator[None]:
    yield
    ub_overlap.disable()


class Layer(nn.Module):
    """A gather, two matmuls and a reduce_scatter, with this rank's columns and rows. [M / ranks, D] -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)

    def forward(self, shard: Tensor) -> Tensor:
        x = funcol.all_gather_tensor_autograd(shard, 0, dist.group.WORLD)
        y = self.down(torch.relu(self.up(x)))
        return shard + funcol.reduce_scatter_tensor_autograd(y, "sum", 0, dist.group.WORLD)


def run_inductor(rank: int, world: int) -> str:
    """Compile for "inductor": plain, enabled, and after disable. Return what is not as expected, or ""."""
    layer = Layer()
    shard = torch.randn(64, 64, generator=torch.Generator().manual_seed(rank))

    def step(call: Any) -> list[Tensor]:
        layer.zero_grad()
        output = call(shard)
        output.square().sum().backward()
        return [output.detach(), *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]

    def count_plans(**how: Any) -> int:
        torch.compiler.reset()
        mark = HISTORY.mark()
        with uncached():
            for a, b in zip(step(torch.compile(layer, **how)), truth, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        plans = HISTORY.since(mark)
        assert all(decision.strategy != NONE for plan in plans for decision in plan.decisions), plans
        return len(plans)

    def explain() -> int:
        """Return how many sites `explain` shows as overlapped in a model of which "inductor" compiles a part."""
        report = ub_overlap.explain(nn.Sequential(torch.compile(layer)))(shard.requires_grad_())
        return sum(decision.strategy != NONE for decision in report.decisions)

    truth, seen = step(layer), []
    found = [count_plans()]
    ub_overlap.enable({"overlap": "force"})
    found += [count_plans(), count_plans(options={"post_grad_custom_pre_pass": seen.append}), count_plans(mode="default")]
    explained = [explain()]
    ub_overlap.disable()
    explained.append(explain())  # with default options, as of any model that another backend compiled
    found.append(count_plans(backend="inductor"))
    if found != [0, 2, 2, 2, 0] or explained != [4, 0]:
        return f"plans: {found}, sites that explain shows: {explained}"
    return "" if len(seen) == 2 else f"the user's pass ran {len(seen)} times"


def test_on_ranks(pool2: RankPool) -> None:
    """Forward and backward are overlapped while it is enabled, next to a pass of the user, with the numbers of eager code."""
    assert pool2.run(run_inductor) == [""] * 2


@pytest.mark.tier("test")
@pytest.mark.parametrize("world", [0, 1])
def test_a_process_without_peers_is_plain(world: int) -> None:
    """Without a group, or with one of one rank, the graph does not come to our backend."""
    ub_overlap.enable()

    def compile_one(*_: int) -> int:
        mark = HISTORY.mark()
        with torch.no_grad():
            torch.compile(lambda x: x.sin() + 1.0)(torch.ones(8))
        return len(HISTORY.since(mark))

    assert (FakeRanks(1).run(compile_one)[0] if world else compile_one()) == 0


def test_the_backend_of_a_program_holds_nothing_of_ours() -> None:
    """Copies and pickles of torch's object, its configuration and equality are as before; `disable` gives its call back."""
    plain = compat.InductorBackend.__call__
    before = compat.InductorBackend("default", {"max_autotune": False}, None)
    ub_overlap.enable({"overlap": "force"})
    ub_overlap.enable({"overlap": "auto"})
    after = compat.InductorBackend("default", {"max_autotune": False}, None)
    assert compat.InductorBackend.__call__ is not plain
    assert before == after == copy.deepcopy(after) == pickle.loads(pickle.dumps(after)) and after.config == before.config
    ub_overlap.disable()
    ub_overlap.disable()
    assert compat.InductorBackend.__call__ is plain


def test_invalid_options_are_refused_at_once() -> None:
    plain = compat.InductorBackend.__call__
    with pytest.raises(OptionError, match="overlap"):
        ub_overlap.enable({"overlap": "always"})
    assert compat.InductorBackend.__call__ is plain


def test_the_variable(tmp_path: Path) -> None:
    """1, a JSON object, or a file; anything else names the variable."""
    file = tmp_path / "options.json"
    plain = compat.FSDPState._lazy_init
    file.write_text(json.dumps({"overlap": "off"}))
    known = (("1", {}), ('{"overlap": "force", "fsdp": true}', {"overlap": "force"}), (str(file), {"overlap": "off"}))
    for text, expected in known:
        module.enable_by_variable(text)
        assert module._options == expected
        assert (compat.FSDPState._lazy_init is not plain) == ("fsdp" in text)
    for text in ("maybe", "{overlap: force}", '{"fsdp": "no"}'):
        with pytest.raises(OptionError, match="UB_OVERLAP_ENABLE"):
            module.enable_by_variable(text)


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    ("value", "first"),
    [("", "torch"), ("0", "torch"), ("1", "torch"), ("1", "ub_overlap._enable"), ("1", "ub_overlap.compiler.options")],
)
def test_torch_calls_the_entry_point(value: str, first: str) -> None:
    """`import torch` alone enables it where the variable says so, also in the middle of our own imports.

    Else nothing of ub_overlap is imported.
    """
    code = (
        f"import sys, {first}, torch; "
        "print(torch._TorchCompileInductorWrapper.__call__.__module__, 'ub_overlap' in sys.modules)"
    )
    environment = {**os.environ, "UB_OVERLAP_ENABLE": value}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=120, check=False)
    assert done.stdout.split() == (["ub_overlap._enable", "True"] if value == "1" else ["torch", "False"]), done.stderr
