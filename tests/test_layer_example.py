"""Tests of examples/layer_with_overlap.py under torchrun on CPU ranks, and of its replicas, masks and verdict.

Every run has a hard deadline. The runs use inner=aot_eager, because the tested code precedes Inductor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.gpu.launch import launch, torchrun
from tests.harness.programs import run_program
from tests.harness.ranks import PATIENCE_S, RankPool
from ub_overlap.compiler.plan.decision import Decision
from ub_overlap.compiler.plan.reasons import Reason

EXAMPLE = Path(__file__).resolve().parents[1] / "examples/layer_with_overlap.py"
SMALL = "--device cpu --overlap force --option inner=aot_eager --seq-length 32 --num-heads 4 --head-dim 16 --num-iters 3"
MLP_SITES, BLOCK_SITES = (6, 6), (12, 12)
"""(overlapped, of all) of one layer: in forward a gather and a scatter for each part; in backward the same and its LayerNorm's
two all_reduces, concurrent with matmuls that the assignment leaves to them."""


def run(ranks: int, flags: str) -> tuple[int | None, str]:
    """Return (exit code, output)."""
    finished = run_program(ranks, EXAMPLE, flags.split())
    return finished.code, finished.output


def run_by_torchrun(ranks: int, flags: str) -> tuple[int | None, str]:
    """Do the same as a user does it."""
    finished = launch([*torchrun(ranks), str(EXAMPLE), *flags.split()], PATIENCE_S)
    return finished.code, finished.output


def losses(output: str, variant: str) -> list[str]:
    return re.findall(rf"\[rank 0\] iteration \d+ {variant}: forward .*, backward .*, optimizer .*; loss (\S+)", output)


def sites(output: str, variant: str) -> tuple[int, int]:
    row = re.search(rf"^{variant} +\S+ +\S+x +(\d+) of (\d+) +", output, re.MULTILINE)
    assert row, output
    return int(row[1]), int(row[2])


def check(code: int | None, output: str, expected: tuple[int, int]) -> None:
    """Check that both variants trained alike, one with `expected` overlapped sites and the other with none."""
    assert code == 0, output
    assert "the losses agree" in output
    assert "DO NOT AGREE" not in output
    assert sites(output, "overlap") == expected
    assert sites(output, "no overlap") == (0, expected[1])
    with_overlap, without = losses(output, "overlap"), losses(output, "no overlap")
    assert len(with_overlap) == len(without) == 3
    assert float(with_overlap[-1]) < float(with_overlap[0])


@pytest.mark.tier("full")
def test_one_replica_and_the_same_seed() -> None:
    """A run without overlap has the losses of the comparison run on 2 ranks: dropout and data are the same."""
    code, output = run(2, SMALL)
    check(code, output, MLP_SITES)
    for rank in (0, 1):
        assert f"[rank {rank}] TP group [0, 1], DP group [{rank}]" in output
    code, alone = run_by_torchrun(2, SMALL + " --no-comm-overlap --verbose")
    assert code == 0, alone
    assert losses(alone, "no overlap") == losses(output, "no overlap")
    assert losses(alone, "overlap") == []
    assert "[rank 1] iteration 2 no overlap" in alone
    assert "[rank 1] iteration" not in output


@pytest.mark.tier("full")
@pytest.mark.parametrize(("recipe", "collectives"), [("tensorwise", 8), ("delayed", 7)])
def test_float8(recipe: str, collectives: int) -> None:
    """Both variants run in FP8 with the expected numbers of overlapped sites and collectives.

    Sites: each part's gather and scatter, forward and backward. All_reduces agree on scales (one for all tensors with delayed
    scaling). The LayerNorm's two all_reduces have no independent 16-bit matmul.
    """
    code, output = run(2, f"{SMALL} --option split=off --fp8 --fp8-recipe {recipe}")
    check(code, output, (4, collectives))
    assert f"with linears in float8 ({recipe})" in output


@pytest.mark.tier("full")
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--layer mlp --ddp outside --accumulate 2", MLP_SITES),
        ("--layer mlp --ddp inside --accumulate 2", MLP_SITES),
        ("--layer block --ddp inside", BLOCK_SITES),
    ],
)
def test_two_replicas(flags: str, expected: tuple[int, int]) -> None:
    """The sites on 4 ranks are those of one replica.

    DDP is around the compiled layer or inside it, and some passes run under no_sync.
    """
    code, output = run(4, f"{SMALL} --num-replicas 2 {flags}")
    check(code, output, expected)
    for rank in range(4):
        first, other = rank // 2 * 2, rank % 2
        assert f"[rank {rank}] TP group [{first}, {first + 1}], DP group [{other}, {other + 2}]" in output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-replicas 2", "--num-replicas 2: expected a divisor of the 3 ranks"),
        ("--num-heads 4", "--num-heads 4: expected a multiple of 3"),
        ("--num-heads 3 --seq-length 32", "--seq-length 32: expected a multiple of 3"),
        ("--num-heads 3 --seq-length 9 --fp8-recipe delayed", "--fp8-recipe delayed: expected together with --fp8"),
        ("--dropout 1", "--dropout from 0 to below 1"),
        ("--num-heads 3 --seq-length 9 --option inner", "--option inner: expected NAME=VALUE"),
        ("--num-heads 3 --seq-length 9 --option overlap=off", "--overlap or --no-comm-overlap for the overlap"),
        ("--num-heads 3 --seq-length 9 --device cuda", "--device cuda: 3 ranks on this host need as many GPUs"),
    ],
)
def test_bad_flags(flags: str, message: str, flags_of: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        flags_of(*flags.split())
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_flags(flags_of: Callable[..., Any]) -> None:
    """Flags of one of three ranks are parsed; options of torch.compile are JSON values or strings."""
    flags = flags_of("--num-heads", "6", "--seq-length", "9", "--option", "min_bytes=3", "--option", "inner=aot_eager")
    assert (flags.tensor_parallel, flags.device, flags.dtype) == (3, "cpu", torch.float32)
    assert flags.options == {"min_bytes": 3, "inner": "aot_eager"}


@pytest.fixture
def flags_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return the example's parser in an environment of 3 ranks on a host without GPUs."""
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    from layer.flags import parse

    return lambda *argv: parse(argv)


def test_losses_that_differ_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    from layer.run import verdict
    from layer.train import Record

    a = Record(name="a", losses=[0.5, 0.25])
    for last, dtype, code in (
        (0.25 + 1e-5, torch.float32, 0),
        (0.251, torch.float32, 1),
        (0.251, torch.bfloat16, 0),
        (0.26, torch.bfloat16, 1),
        (math.nan, torch.bfloat16, 1),
        (math.inf, torch.float32, 1),
    ):
        text, got = verdict(a, Record(name="b", losses=[0.5, last]), dtype)
        assert got == code, (last, dtype)
        assert ("DO NOT AGREE" in text) is (code == 1)


def in_ranks(rank: int, world: int) -> None:
    """Compare a sharded block with the unsharded one: output, input and weight gradients, masks, unequal replicas."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    from layer.model import Stack, parallelize
    from layer.replicas import LocalParameters
    from layer.rng import Masks
    from layer.train import unequal_replicas

    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
    masks = Masks(mesh["tp"], seed=3)
    masks.check()
    keep = masks.draw((8, 2, 64), Replicate(), 0.25)
    again = Masks(mesh["tp"], seed=3)
    again.check()
    mine = again.draw((8, 2, 64), Shard(0), 0.25)
    assert torch.equal(mine, keep.chunk(world)[rank]), "same seed, same mask: the shard is the whole one's"
    assert 0.65 < keep.float().mean() < 0.85
    other = Masks(mesh["tp"], seed=3, replica=1)
    other.check()
    assert not torch.equal(keep, other.draw((8, 2, 64), Replicate(), 0.25)), "replicas have masks of their own"

    def stack() -> Stack:
        built = Stack("block", 2, hidden=64, head_dim=16, mlp=128, dropout=0.25)
        built.init_weights(5)
        return built

    whole, local = stack(), LocalParameters(parallelize(stack(), mesh["tp"]))
    x = torch.randn(8, 2, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    share = x.detach().chunk(world)[rank].clone().requires_grad_()
    expected, got = whole(x, *[keep] * 4), local(share, *[mine] * 4)
    torch.testing.assert_close(got, expected.chunk(world)[rank])
    expected.square().sum().backward()
    got.square().sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(share.grad, x.grad.chunk(world)[rank], rtol=1e-4, atol=1e-4)
    gradients = {name.replace(".", "__"): p.grad for name, p in whole.named_parameters()}
    for name, parameter in local.named_parameters():
        gradient = gradients[name]
        assert gradient is not None
        if name.endswith(("up__weight", "up__bias", "qkv__weight", "qkv__bias")):
            gradient = gradient.chunk(world)[rank]
        elif name.endswith(("down__weight", "proj__weight")):
            gradient = gradient.chunk(world, 1)[rank]
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}")

    replicated = [name for name, p in local.named_parameters() if p.dim() == 1 and "up" not in name and "qkv" not in name]
    sharded = set(unequal_replicas(local, dist.group.WORLD))
    assert sharded and not sharded & set(replicated)
    with torch.no_grad():
        local.get_parameter(replicated[0]).add_(rank)
    assert replicated[0] in unequal_replicas(local, dist.group.WORLD)


def test_a_sharded_block_is_the_whole_one(pool2: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    pool2.run(in_ranks)


class Plain(nn.Module):
    """MLPs over functional collectives of plain tensors, whose graphs DDPOptimizer can split. 1 MiB of weights per linear."""

    def __init__(self, group: object) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(256, 1024, bias=False) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(1024, 256, bias=False) for _ in range(2))
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        from torch.distributed import _functional_collectives as collectives

        for up, down in zip(self.up, self.down, strict=True):
            whole = collectives.all_gather_tensor_autograd(x, 0, self.group)
            x = x + collectives.reduce_scatter_tensor_autograd(down(F.gelu(up(whole))), "sum", 0, self.group)
        return x


def ddp_of(rank: int, world: int, order: str, mode: Any) -> tuple[list[Tensor], list[Decision]]:
    """Run two passes (one under no_sync) of `Plain` under DDP. Return gradients and decisions of the compiled graphs."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel

    from ub_overlap.compiler.ddp import optimize_ddp
    from ub_overlap.compiler.reports.history import HISTORY

    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    mark = HISTORY.mark()
    torch.manual_seed(4)
    model: nn.Module = Plain(mesh.get_group("tp"))
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    optimize_ddp(mode)
    try:
        options = {"overlap": "force", "split": "off", "inner": "aot_eager"}
        inner = torch.compile(model, backend="ub_overlap", options=options) if order == "outside" else model
        ddp = DistributedDataParallel(inner, process_group=mesh.get_group("dp"), bucket_cap_mb=1)  # type: ignore[arg-type]
        call = ddp if order == "outside" else torch.compile(ddp, backend="ub_overlap", options=options)
        with ddp.no_sync():
            call(x).square().mean().backward()
        call(2 * x).square().mean().backward()
    finally:
        optimize_ddp("ddp_optimizer")
    return [p.grad for p in model.parameters() if p.grad is not None], [
        decision for plan in HISTORY.since(mark) for decision in plan.decisions
    ]


@pytest.mark.tier("full")
@pytest.mark.parametrize("order", ["outside", "inside"])
def test_ddp_keeps_sites_or_gives_reasons(order: str, pool4: RankPool) -> None:
    """Unsplit graphs keep all 8 sites, and split graphs have equal gradients.

    Each piece of DDPOptimizer's split has a plan. A collective separated from its matmul has a reason that names the split.
    """
    whole = pool4.run(ddp_of, order, "no_optimization")
    traced = pool4.run(ddp_of, order, "python_reducer") if order == "inside" else whole
    split = pool4.run(ddp_of, order, "ddp_optimizer")
    for rank in range(4):
        assert len(whole[rank][0]) == 4
        for gradients, decisions in (whole[rank], traced[rank]):
            torch.testing.assert_close(gradients, whole[rank][0])
            assert [d.overlapped for d in decisions] == [True] * 8, decisions
            assert [d.phase for d in decisions] == ["forward"] * 4 + ["backward"] * 4
        gradients, decisions = split[rank]
        torch.testing.assert_close(gradients, whole[rank][0])
        assert len(decisions) == 8
        lost = [d for d in decisions if not d.overlapped]
        assert {d.phase for d in lost} == {"forward", "backward"}, (
            "the borders part gathers and matmuls, else nothing is tested"
        )
        for d in lost:
            assert d.reason is Reason.NO_MATMUL
            assert "another graph" in d.detail and "DDPOptimizer's split" in d.detail
    for rank in range(2):  # the replicas of a shard have averaged gradients
        torch.testing.assert_close(whole[rank][0], whole[rank + 2][0])
