"""ub_overlap.pack: sibling weights in one storage, in place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import ub_overlap
from tests.compiler.rank_compile import FORCE, INDUCTOR, build
from tests.harness.ranks import RankPool
from tests.harness.tiers import INNER
from tests.models.compare import uncached, values
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.runtime import ops  # noqa: F401  (registers packed_weight)
from ub_overlap.runtime.errors import OptionError
from ub_overlap.runtime.pack import are_adjacent


def packed_weight(weights: list[Tensor], site: str = "test_pack/any") -> Tensor:
    return torch.ops.ub_overlap.packed_weight.default(weights, site)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(8, n, bias=False) for n in (8, 4, 4))
        self.w1, self.w3 = nn.Linear(8, 12), nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        return (self.wq(x)[:, :4] * self.wk(x) + self.wv(x)).sum() + (self.w1(x) * self.w3(x)).sum()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        return sum(layer(x) for layer in self.layers)  # type: ignore[return-value]


def weights(block: Any, *names: str) -> list[Tensor]:
    return [getattr(block, name).weight for name in names]


def is_packed(model: Model) -> bool:
    groups = [weights(block, *names) for block in model.layers for names in (("wq", "wk", "wv"), ("w1", "w3"))]
    return all(are_adjacent(group) for group in groups)


def test_only_the_memory_changes() -> None:
    model, same = Model(), Model()
    parameters, state = dict(model.named_parameters()), {k: v.clone() for k, v in model.state_dict().items()}
    optimizer, reference = (torch.optim.AdamW(m.parameters(), 0.1) for m in (model, same))
    packed = ub_overlap.pack(model)
    assert [(g.module, g.names) for g in packed] == [
        (f"layers.{i}", names) for names in (("wq", "wk", "wv"), ("w1", "w3")) for i in (0, 1)
    ]
    assert packed[0].bytes == 16 * 8 * 4 and is_packed(model)
    assert all(model.get_parameter(name) is parameter for name, parameter in parameters.items())
    assert list(model.state_dict()) == list(state) and all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    x = torch.randn(5, 8)
    for step in range(2):
        for m, o in ((model, optimizer), (same, reference)):
            m(x).backward()
            m(x).backward()
            o.step()
            o.zero_grad(set_to_none=bool(step))
        for a, b in zip(model.parameters(), same.parameters(), strict=True):
            assert torch.equal(a, b) and (a.grad is None) == (b.grad is None)
    assert is_packed(model) and ub_overlap.pack(model) == packed, "packing twice moves nothing"


@pytest.mark.parametrize(
    ("move", "stays"),
    [
        (lambda m, path: m.load_state_dict(Model().state_dict()), True),
        (lambda m, path: torch.save(m.state_dict(), path) or m.load_state_dict(torch.load(path)), True),
        (lambda m, path: m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}, assign=True), False),
        (lambda m, path: m.to(torch.float64), False),
        (lambda m, path: setattr(m, "layers", copy.deepcopy(m.layers)), False),
    ],
    ids=["load", "save and load", "assign", "to", "deepcopy"],
)
def test_moved_weights(move: Callable[[Model, Path], Any], stays: bool, tmp_path: Path) -> None:
    """Weights that have moved are right, and are packed again by a second call."""
    model = Model()
    ub_overlap.pack(model)
    move(model, tmp_path / "state.pt")
    assert is_packed(model) == stays
    group = weights(model.layers[0], "wq", "wk", "wv")
    assert torch.equal(packed_weight(group), torch.cat(group))
    ub_overlap.pack(model)
    assert is_packed(model)


def test_a_model_with_tensors_without_storage() -> None:
    model = Model()
    model.register_buffer("mask", torch.eye(3).to_sparse())
    assert len(ub_overlap.pack(model)) == 4


def test_the_op_copies_only_what_is_apart() -> None:
    model = Model()
    group = weights(model.layers[0], "w1", "w3")
    assert packed_weight(group).data_ptr() != group[0].data_ptr()
    ub_overlap.pack(model)
    whole = packed_weight(group)
    assert whole.data_ptr() == group[0].data_ptr() and whole.shape == (24, 8) and torch.equal(whole, torch.cat(group))
    assert packed_weight(group[::-1]).data_ptr() != group[0].data_ptr(), "the order in memory is another"


def test_copies_are_logged_once_for_each_site(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    ub_overlap.pack(model)
    moved = copy.deepcopy(model)
    for site in ("test_pack/first", "test_pack/second"):
        caplog.clear()
        packed_weight(weights(model.layers[0], "wq", "wk", "wv"), site)
        assert not caplog.records, "nothing was copied"
        for _ in range(3):
            packed_weight(weights(moved.layers[0], "wq", "wk", "wv"), site)
        (record,) = caplog.records
        assert record.levelname == "WARNING" and f"Where: {site}. Got: 3 weights apart" in record.message
        assert "call ub_overlap.pack(model) again" in record.message
    ub_overlap.pack(moved)
    caplog.clear()
    packed_weight(weights(moved.layers[0], "wq", "wk", "wv"), "test_pack/third")
    assert not caplog.records


def fixed(name: str) -> nn.Module:
    """Return a model whose weights cannot be packed."""
    if name == "meta":
        with torch.device("meta"):
            return Model()
    model = Model()
    for block in model.layers:
        if name == "dtype":
            block.wk.bfloat16()
        elif name == "inner size":
            block.wk = nn.Linear(6, 4, bias=False)
        elif name == "tied":
            block.wv.weight = block.wk.weight
        elif name == "part":
            block.wk.weight.data = torch.zeros(9, 8)[1:5]
    return model


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("meta", "on the meta device"),
        ("dtype", "differ in inner size, dtype or device"),
        ("inner size", "differ in inner size, dtype or device"),
        ("tied", "are the same weight"),
        ("part", "a part of another storage"),
    ],
)
def test_weights_that_stay(name: str, why: str) -> None:
    """Default groups are left as they are; a group that the user names is an error that says why."""
    assert all(g.names == ("w1", "w3") for g in ub_overlap.pack(fixed(name)))
    with pytest.raises(OptionError, match=why):
        ub_overlap.pack(fixed(name), [["wq", "wk", "wv"]])


@pytest.mark.parametrize("groups", [[["wq", "no_such"]], [["wq"]], [[]]])
def test_names_that_are_not_there(groups: list[list[str]]) -> None:
    with pytest.raises(OptionError, match="no module has linears of these names"):
        ub_overlap.pack(Model(), groups)


def managed_by_fsdp(rank: int, world: int) -> tuple[int, str]:
    """Return how many groups of a sharded model are packed by default, and the error of a named group."""
    from torch.distributed.fsdp import fully_shard

    model = Model()
    fully_shard(model.layers[0])
    packed = len(ub_overlap.pack(model))
    try:
        ub_overlap.pack(model, [["w1", "w3"]])
    except OptionError as error:
        return packed, str(error)
    return packed, ""


def test_fsdp_is_left_alone(pool2: RankPool) -> None:
    for packed, error in pool2.run(managed_by_fsdp):
        assert packed == 2 and "FSDP manages them" in error and "layers.0" in error


def loaded_whole(rank: int, world: int) -> dict[str, Any]:
    """Pack shards that are views of whole weights, as transformers loads them; once with a whole weight that is also used."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    mesh, found = init_device_mesh("cpu", (world,)), dict[str, Any]()
    for name in ("alone", "also used"):
        model = nn.Module()
        model.w1, model.w3 = nn.Linear(8, 4, bias=False), nn.Linear(8, 4, bias=False)
        wholes = [torch.randn(4, 8) for _ in range(2)]
        for linear, whole in zip((model.w1, model.w3), wholes, strict=True):
            shard = DTensor.from_local(whole.chunk(world)[rank], mesh, [Shard(0)], run_check=False)
            linear.weight = nn.Parameter(shard)
        if name == "also used":
            model.register_buffer("whole", wholes[0])
        found[name] = len(ub_overlap.pack(model))
        local = [linear.weight.to_local() for linear in (model.w1, model.w3)]
        found[f"{name}: equal"] = all(torch.equal(a, b.chunk(world)[rank]) for a, b in zip(local, wholes, strict=True))
        found[f"{name}: adjacent"] = are_adjacent(local)
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
        compiled = torch.compile(lambda x, m=model: m.w1.weight.to_local() @ x.t(), backend="eager", fullgraph=True)
        found[f"{name}: traced"] = torch.allclose(compiled(x), wholes[0].chunk(world)[rank] @ x.t())
    return found


def test_shards_of_loaded_weights(pool2: RankPool) -> None:
    """They are moved, unless another tensor of the model lies in the whole weight."""
    for found in pool2.run(loaded_whole):
        assert (found["alone"], found["alone: adjacent"]) == (1, True)
        assert (found["also used"], found["also used: adjacent"]) == (0, False)
        assert all(found[f"{name}: {what}"] for name in ("alone", "also used") for what in ("equal", "traced"))


LLAMA = ("tests.models.dtensor_llama", {"kv_heads": 4})


def trained(rank: int, world: int, options: dict[str, Any]) -> tuple[list[str], list[tuple[str, int]]]:
    """Return what differs from eager, and the bytes that each packed site copies.

    The model runs twice. After the first step its weights leave their storages.
    """
    eager, case = build(rank, world, *LLAMA), build(rank, world, *LLAMA)
    truth = values(eager, eager.module)
    assert len(ub_overlap.pack(case.module)) == 2
    mark, wrong = HISTORY.mark(), []
    with uncached():
        compiled = torch.compile(case.module, backend="ub_overlap", options=options)
        for step in ("packed", "moved"):
            ours = values(case, compiled)
            for name, expected in truth.items():
                found = ours[name]
                if expected is not None and found is not None and not torch.allclose(expected, found, atol=1e-4, rtol=1e-4):
                    wrong.append(f"{step}: {name}")
            for parameter in case.module.parameters():
                local = getattr(parameter, "_local_tensor", parameter)
                local.data = local.data.clone()
            case.module.zero_grad()
            for tensor in case.inputs:
                tensor.grad = None
    return wrong, [(d.id, d.pack_bytes or 0) for plan in HISTORY.since(mark) for d in plan.decisions if d.packs]


@pytest.mark.tier("full")
@pytest.mark.parametrize("inner", INNER)
def test_packed_model(pool2: RankPool, inner: str) -> None:
    """A gather copies no weight, a sum only its left operands; moved weights give the same results."""
    options = {**(FORCE if inner == "aot_eager" else INDUCTOR), "pack": "force"}
    for wrong, sites in pool2.run(trained, options, timeout=300):
        assert not wrong
        assert [size for site, size in sites if site.startswith("forward")] == [0, 0]
        backward = [size for site, size in sites if site.startswith("backward")]
        assert len(backward) == 2 and all(size > 0 for size in backward)
