"""Module paths and source lines of sites: those that a user would write and look for."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.fx import Graph

from tests.compiler.rank_compile import FORCE
from tests.harness.fake_ranks import FakeRanks
from tests.models.compare import uncached
from tests.models.dtensor_llama import tensor_mesh
from ub_overlap.compiler.graph.source_location import module_path, module_paths, source_line
from ub_overlap.compiler.reports.history import HISTORY

HERE = Path(__file__).name


@pytest.mark.parametrize(
    ("source", "paths"),
    [
        ("L['self'].layers.0.wq", ("layers.0.wq",)),
        ("L['self']._modules['layers']._modules['0']", ("layers.0",)),
        ("L['self']", ()),
        ("L['fn']", ()),
        ("L['fn'].0", ("0",)),
        ("L['args'][0].layers.1", ("layers.1",)),
        ("L['self'].layers.0._orig_mod.w1", ("layers.0.w1",)),
        ("L['self'].layers.0._checkpoint_wrapped_module.w1", ("layers.0.w1",)),
        ("L['model'].layers.0", ("model.layers.0", "layers.0")),
        ("G['model'].layers.0", ("model.layers.0", "layers.0")),
        ("L['step'].__closure__[0].cell_contents.layers.0", ("step.layers.0", "layers.0")),
        ("L['models']['student'].w1", ("models.student.w1", "student.w1")),
        ("L['layers'][3].w1", ("layers.3.w1", "3.w1")),
        ("layers.0", ("layers.0",)),
        ("L['self'].layers.0.attention.forward.__self__.wqkv", ("layers.0.attention.wqkv",)),
        ("L['block'].forward.__self__.mlp", ("block.mlp", "mlp")),
    ],
)
def test_paths_of_dynamo_sources(source: str, paths: tuple[str, ...]) -> None:
    node = Graph().placeholder("x")
    node.meta["nn_module_stack"] = {"1": ("L['self']", nn.Module), "2": (source, nn.Linear)}
    assert module_paths(node) == paths
    assert module_path(node) == (paths[0] if paths else "")


def test_the_line_is_the_innermost_one_of_the_user() -> None:
    torch_file = Path(torch.__file__).parent / "distributed" / "tensor" / "_api.py"
    frames = [("/home/me/train.py", "model(x)"), ("/home/me/model.py", "self.w2(x)"), (str(torch_file), "redistribute(")]
    frames += [(f"/v/site-packages/transformers/{f}/tensor_parallel.py", "hook(x)") for f in ("integrations", "distributed")]
    node = Graph().placeholder("x")
    for count, expected in ((5, "/home/me/model.py:7: self.w2(x)"), (1, "/home/me/train.py:7: model(x)")):
        node.meta["stack_trace"] = "".join(f'  File "{path}", line 7, in f\n    {code}\n' for path, code in frames[:count])
        assert source_line(node) == expected
    node.meta["stack_trace"] = f'  File "{torch_file}", line 7, in f\n    redistribute(\n'
    assert source_line(node) == ""
    model_code = "/v/site-packages/transformers/models/llama/modeling_llama.py"
    node.meta["stack_trace"] = f'  File "{model_code}", line 7, in f\n    self.mlp(x)\n'
    assert source_line(node) == f"{model_code}:7: self.mlp(x)"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.w1(x))
        return self.w2(h)  # line of a block


class Net(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)  # line of a net
        return x


def sequence() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


def sharded(module: nn.Module, mesh: Any) -> nn.Module:
    """Shard every pair of linears in `module`."""
    for inner in list(module.modules()):
        names = ("w1", "w2") if isinstance(inner, Block) else ("0", "2")
        if isinstance(inner, Block) or (isinstance(inner, nn.Sequential) and isinstance(inner[0], nn.Linear)):
            first, last = ColwiseParallel(input_layouts=Shard(0)), RowwiseParallel(output_layouts=Shard(0))
            parallelize_module(inner, mesh, {names[0]: first, names[1]: last})
    return module


MODELS: dict[str, Callable[[], nn.Module]] = {
    "sequential": sequence,
    "sequential of blocks": lambda: nn.Sequential(Block(), Block()),
    "block": Block,
    "net of sequentials": lambda: Net(sequence),
    "net, block by block": lambda: Net(Block),
    "function": lambda: Net(Block),
}
Row = tuple[str, str, str]
"""(phase, module, source line)."""


def sites(rank: int, world: int, rules: list[dict[str, str]]) -> tuple[dict[str, list[Row]], dict[str, list[str]]]:
    """Return, by model, the sites of a training step, and the modules of those that `rules` leave alone."""
    mesh, rows, refused = tensor_mesh(world, False), dict[str, list[Row]](), dict[str, list[str]]()
    for name, make in MODELS.items():
        torch._dynamo.reset()
        model, options = sharded(make(), mesh), {**FORCE, "overrides": rules}
        run: Any = model
        if name == "net, block by block":
            for layer in model.layers:  # type: ignore[union-attr]
                layer.compile(backend="ub_overlap", options=options)
        elif name == "function":
            run = torch.compile(lambda x: model(x), backend="ub_overlap", options=options)  # noqa: B023
        else:
            run = torch.compile(model, backend="ub_overlap", options=options)
        mark = HISTORY.mark()
        with uncached():
            run(torch.randn(8, 16).requires_grad_()).sum().backward()  # the call
        decisions = [d for plan in HISTORY.since(mark) for d in plan.decisions]
        rows[name] = [(d.phase, d.module, d.source) for d in decisions]
        refused[name] = [d.module for d in decisions if d.reason is not None and d.reason.value == "disabled_by_user"]
    return rows, refused


@pytest.mark.tier("test")
@pytest.mark.filterwarnings("ignore:ub_overlap")
def test_dtensor_sites_have_the_users_modules_and_lines(fake2: FakeRanks) -> None:
    """Sites of DTensor plans, forward and backward. A rule by module matches the path as the user knows it."""
    rules = [{"module": "2", "strategy": "none"}, {"module": ["*.w2", "w2"], "strategy": "none"}]
    rules += [{"module": "layers.1.2", "strategy": "none"}]
    modules = {
        "sequential": ["0", "2"],
        "sequential of blocks": ["0.w1", "0.w2", "1.w1", "1.w2"],
        "block": ["w1", "w2"],
        "net of sequentials": ["layers.0.0", "layers.0.2", "layers.1.0", "layers.1.2"],
        "net, block by block": ["w1", "w2"],
        "function": ["model.layers.0.w1", "model.layers.0.w2", "model.layers.1.w1", "model.layers.1.w2"],
    }
    matched = {
        "sequential": {"2"},
        "net of sequentials": {"layers.1.2"},
        "function": {"model.layers.0.w2", "model.layers.1.w2"},
        "sequential of blocks": {"0.w2", "1.w2"},
    }
    lines = {"sequential": "# the call", "net of sequentials": "# line of a net"}
    for rows, refused in fake2.run(sites, rules):
        for name, paths in modules.items():
            found = {phase: [module for p, module, _ in rows[name] if p == phase] for phase in ("forward", "backward")}
            assert list(dict.fromkeys(found["forward"])) == paths, name
            assert list(dict.fromkeys(found["backward"])) == paths[::-1], name
            assert set(refused[name]) == matched.get(name, {"w2"}), name
            for phase, module, source in rows[name]:
                assert re.match(rf".*{HERE}:\d+: ", source), (name, phase, module, source)
                assert lines.get(name, "self.w") in source, (name, phase, module, source)
