"""ub_overlap.explain of models that the process compiled before, and compilations after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

import ub_overlap
from tests.compiler.rank_compile import FORCE, world_name
from tests.harness.fake_ranks import FakeRanks
from tests.harness.ranks import RankPool
from tests.harness.tiers import in_full
from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.compiler.reports.isolated_compile import compiled_parts


class Block(nn.Module):
    """Two tensor-parallel matmuls: behind a gather, and before a reduce_scatter."""

    def __init__(self, group: Any, breaks: bool = False) -> None:
        super().__init__()
        self.group, self.breaks = group, breaks
        self.up, self.down = (nn.Parameter(torch.randn(8, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.breaks:
            torch.compiler.disable(lambda: None)()
        hidden = funcol.all_gather_tensor_autograd(x, 0, self.group) @ self.up
        return funcol.reduce_scatter_tensor_autograd(hidden @ self.down, "sum", 0, self.group)


class Model(nn.Module):
    """Two blocks."""

    def __init__(self, group: Any, breaks: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(group, breaks) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def strategies(report: ub_overlap.Report) -> list[str]:
    return [f"{d.phase} {d.strategy}" for d in report.decisions]


def explained(model: Callable[..., Any], options: dict[str, Any] | None, rows: int = 4) -> list[str]:
    return strategies(ub_overlap.explain(model, options)(torch.ones(rows, 8, requires_grad=True)))


def step(function: Callable[..., Any], rows: int = 4) -> int:
    """Run one forward and backward. Return the number of plans that this compiled."""
    mark = HISTORY.mark()
    function(torch.ones(rows, 8, requires_grad=True)).sum().backward()
    return HISTORY.mark() - mark


def any_order(rank: int, world: int, kind: str, breaks: bool) -> dict[str, Any]:
    """Explain before and after compiling, and count what each call of the user's callable compiles."""
    torch.compiler.reset()
    model = Model(world_name(), breaks)
    plain: Callable[..., Any] = model.forward if kind == "function" else model
    reports = [explained(plain, FORCE)]
    if kind == "in place":
        model.compile(backend="ub_overlap", options=FORCE)
        compiled: Callable[..., Any] = model
    else:
        compiled = torch.compile(plain, backend="ub_overlap", options=FORCE)
    compiles = [step(compiled)]
    for again in (plain, compiled, compiled):
        reports.append(explained(again, FORCE))
        compiles.append(step(compiled))
    reports.append(explained(compiled, None))
    other = explained(compiled, {**FORCE, "overrides": {"*": "none"}})
    return {"reports": reports, "compiles": compiles, "other": other}


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    ("kind", "breaks"),
    [in_full(("module", False)), in_full(("in place", False)), ("function", False), in_full(("module", True))],
)
def test_any_order(fake2: FakeRanks, kind: str, breaks: bool) -> None:
    """Every explain reports, and the compiled model compiles once. Without options, explain takes those of the model."""
    for found in fake2.run(any_order, kind, breaks):
        first = found["reports"][0]
        assert len(first) == (4 if breaks else 8) and {line.split(":")[0] for line in first} == {
            "forward pipelined",
            "backward pipelined",
        }
        assert all(report == first for report in found["reports"]), found["reports"]
        assert found["compiles"] == [2, 0, 0, 0]
        assert {line.split()[1] for line in found["other"]} == {"none"}


def of_blocks(rank: int, world: int) -> dict[str, Any]:
    """Explain a model whose blocks are compiled with options of their own, one as a new module and one in place."""
    torch.compiler.reset()
    model = Model(world_name())
    model.blocks[0] = torch.compile(model.blocks[0], backend="ub_overlap", options=FORCE)
    model.blocks[1].compile(backend="ub_overlap", options={**FORCE, "overrides": {"*.1": "none"}})
    step(model)
    calls = [model.blocks[0].forward, model.blocks[1]._compiled_call_impl]
    sites = explained(model, None)
    kept = calls == [model.blocks[0].forward, model.blocks[1]._compiled_call_impl]
    return {"sites": sites, "kept": kept, "again": step(model)}


@pytest.mark.tier("test")
def test_compiled_blocks(fake2: FakeRanks) -> None:
    """The compiled submodules are explained as they run, each with its own graphs and options."""
    first = [f"{phase} pipelined" for phase in ("forward", "forward")]
    second = ["forward pipelined", "forward none", "backward pipelined", "backward none"]
    for found in fake2.run(of_blocks):
        assert found["again"] == 0 and found["kept"]
        assert found["sites"] == [*first, *second, "backward pipelined", "backward pipelined"]


def untouched(rank: int, world: int) -> dict[str, Any]:
    """Explain more often than Dynamo's recompilation limit, with other sizes, between compilations."""
    torch.compiler.reset()
    model = Model(world_name())
    compiled = torch.compile(model, backend="ub_overlap", options=FORCE)
    compiles = [step(compiled)]
    reports = [explained(model, FORCE, rows=4 + 2 * n) for n in range(9)]
    compiles.append(step(compiled))
    compiles.append(step(torch.compile(model, backend="ub_overlap", options={**FORCE, "autotune": False})))
    shapes = {shape for p in HISTORY.plans()[-2:] for d in p.decisions for shape in dict(d.shapes).values()}
    kept = sum(e.code is not None for e in compat.dynamo_entries(Model.forward.__code__))
    return {"reports": reports, "compiles": compiles, "kept": kept, "shapes": sorted(shapes)}


@pytest.mark.tier("full")
def test_limits_and_sizes(pool2: RankPool) -> None:
    """Explaining uses up no recompilation, keeps no compiled code, and does not make the user's sizes dynamic."""
    for found in pool2.run(untouched):
        assert all(len(report) == 8 for report in found["reports"])
        assert found["compiles"] == [2, 0, 2]
        assert not [shape for shape in found["shapes"] if "s" in shape], "dynamic"
        assert found["kept"] == 2  # the user's


def plain_backend(rank: int, world: int) -> list[str]:
    """Explain a model that another backend compiled."""
    torch.compiler.reset()
    model = Model(world_name())
    compiled = torch.compile(model, backend="aot_eager")
    compiled(torch.ones(4, 8))
    return explained(compiled, FORCE)


@pytest.mark.tier("test")
def test_compiled_by_another_backend(fake2: FakeRanks) -> None:
    assert all(len(found) == 8 for found in fake2.run(plain_backend))


def test_parts() -> None:
    """Submodules that another backend compiled are no parts of a model that is not compiled: the whole model is."""
    ours: dict[str, Any] = {"backend": "ub_overlap", "options": FORCE, "dynamic": False, "fullgraph": True}
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    model[0] = torch.compile(model[0], backend="eager")
    assert [p.target for p in compiled_parts(model)] == [model]
    inner = model[1][0]
    model[1][0] = torch.compile(inner, **ours)
    model[1].append(model[1][0])
    (part,) = compiled_parts(model)
    assert (part.target, part.options, part.dynamic, part.fullgraph) == (inner, FORCE, False, True)
    model[1].compile(**ours)
    assert [p.target for p in compiled_parts(model)] == [model[1]._call_impl]
    assert [p.install for p in compiled_parts(torch.compile(model, **ours))] == [None]
    decorated = torch.compile(backend="ub_overlap", mode="default", options=None)(test_parts)
    assert [(p.target, p.options) for p in compiled_parts(decorated)] == [(test_parts, {})]
