"""Joint passes after each other: each reads what those before have left, and values stay.

A program is made of parts that one pass each changes, nested or added up. Passes run in any order, alone and as JointPass.
"""

from __future__ import annotations

import copy
import itertools
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.tensor  # registers _dtensor::shard_dim_alltoall
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy

from tests.compiler.dags import c10d
from tests.compiler.one_rank import OneRank
from tests.harness.fake_ranks import FakeRanks
from tests.harness.tiers import full_but
from ub_overlap.compiler.cost.policy import Policy
from ub_overlap.compiler.fp8.hoist.fold_scales import fold_scales
from ub_overlap.compiler.fp8.hoist.hoist_casts import hoist_casts
from ub_overlap.compiler.fp8.hoist.hoist_legality import HoistConfig
from ub_overlap.compiler.joint.decompose_collectives import decompose_collectives
from ub_overlap.compiler.joint.exchange_sizes import keep_exchange_sizes
from ub_overlap.compiler.joint.merge.merge_amax_reductions import merge_amax_reductions
from ub_overlap.compiler.joint.merge.merge_collectives import merge_collectives
from ub_overlap.compiler.joint.repeats.send_once import send_once
from ub_overlap.compiler.joint.scale_shards import scale_shards
from ub_overlap.compiler.joint.scatter_first import scatter_first
from ub_overlap.compiler.joint.sorted_rows import gather_sorted_rows
from ub_overlap.compiler.match.amax_reductions import mark_amax_reductions
from ub_overlap.compiler.options import Options
from ub_overlap.compiler.passes import JointPass

RANKS, ROWS, WIDTH = 4, 16, 16
F64 = torch.float64
TRIPLES = int(os.environ.get("UB_OVERLAP_FUZZ", 40))
GROUPS: dict[str, str] = {}
FORCE = Options(overlap="force", scatter_first=True)

Part = Callable[[Tensor], Tensor]
Pass = Callable[[Graph], int]


def gather(x: Tensor, group: str = "world") -> Tensor:
    return funcol.all_gather_tensor(x, 0, GROUPS[group])


def scatter(x: Tensor, group: str = "world") -> Tensor:
    return funcol.reduce_scatter_tensor(x, "sum", 0, GROUPS[group])


def gathered_twice(x: Tensor) -> Tensor:
    return scatter(gather(x)) * 0.1 + scatter(gather(x)).sin()


def summed(x: Tensor) -> Tensor:
    return scatter(gather(x.cos())) + scatter(gather(x.sin()))


def gathered_and_summed(x: Tensor) -> Tensor:
    """A sum of reductions whose inputs are merged first."""
    return scatter(gather(x)) + scatter(gather(x))


def summed_twice(x: Tensor) -> Tensor:
    """A sum of reductions, one of which reduces such a sum."""
    return scatter(gather(scatter(gather(x.cos())) + scatter(gather(x)))) + scatter(gather(x.sin()))


def reduced_twice(x: Tensor) -> Tensor:
    """all_reduce, reduce_scatter, and both again: the result of the first pair is the input of the second."""
    for _ in range(2):
        x = gather(scatter(funcol.all_reduce(x, "sum", GROUPS["outer"]), "inner"), "inner") * 0.1
    half = scatter(funcol.all_reduce(x, "sum", GROUPS["outer"]), "inner")
    quarter = scatter(funcol.all_reduce(half, "sum", GROUPS["outer"]), "inner")
    return gather(gather(quarter, "inner"), "inner")


def scaled(x: Tensor) -> Tensor:
    return scatter((gather(x) * 0.3).cos())


def exchanged(x: Tensor) -> Tensor:
    y = torch.ops._dtensor.shard_dim_alltoall(x, 0, 1, GROUPS["world"])
    return torch.ops._dtensor.shard_dim_alltoall(y.sin(), 1, 0, GROUPS["world"])


def repeated(x: Tensor) -> Tensor:
    heads = x[:, : WIDTH // 4].unsqueeze(1).expand(ROWS, 4, WIDTH // 4).clone().view(ROWS, WIDTH)
    return scatter(gather(heads).cos())


def ring(x: Tensor) -> Tensor:
    last, following = [0, 0, 0, ROWS], [0, ROWS, 0, 0]
    once, again = (funcol.all_to_all_single(x, last, following, GROUPS["world"]) for _ in range(2))
    return once.sin() + again.cos()


def sorted_back(x: Tensor) -> Tensor:
    order = torch.argsort(x[:, 0])
    return x.new_zeros(ROWS, WIDTH).index_put((order,), x, accumulate=True)


def counted(x: Tensor) -> Tensor:
    """The counts are in a checkpointed region (`traced`)."""
    counts = (x[:RANKS, 0] > 0).to(torch.int64)
    received = funcol.all_to_all_single(counts, None, None, GROUPS["world"])
    return x * received.sum()


def scale_of(x: Tensor) -> Tensor:
    """Return the power of two that each row is multiplied by before its cast: [rows, 1]."""
    return torch.exp2(torch.floor(torch.log2(448.0 / x.abs().amax(-1, keepdim=True).clamp(min=1e-12))))


def float8(x: Tensor, scale: Tensor) -> Tensor:
    return (x * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def multiplied(lhs: Tensor, lhs_scale: Tensor, scale: Tensor) -> Tensor:
    """Return the float8 matrix times 0.5 on the diagonal, in bfloat16."""
    half = (0.5 * torch.eye(WIDTH, device=lhs.device)).to(torch.float8_e4m3fn)
    return torch._scaled_mm(lhs, half.t(), lhs_scale, scale, out_dtype=torch.bfloat16)


def cast_gathered(x: Tensor) -> Tensor:
    """A gather of what is cast afterwards."""
    rows = gather(x.bfloat16())
    scale = scale_of(rows.float())
    return scatter(multiplied(float8(rows.float(), scale), scale.reciprocal(), torch.ones(1, WIDTH)).float().cos())


def scaled_product(x: Tensor) -> Tensor:
    """A product that is scaled in front of the sum over ranks."""
    rows, one = gather(x).sin(), torch.ones(())
    scale, columns = scale_of(rows), torch.exp2(torch.floor(torch.ones(1, WIDTH)))
    product = multiplied(float8(rows, scale), one, one) * (scale.reciprocal() * columns)
    return scatter(product.bfloat16()).float()


def two_scales(x: Tensor) -> Tensor:
    """Two amaxes, each of all ranks."""
    largest = [funcol.all_reduce(y.abs().amax(), "max", GROUPS["world"]) for y in (x, x.sin())]
    one, other = (448.0 / amax for amax in largest)
    return float8(x, one).to(x.dtype) / one + float8(x.cos(), other).to(x.dtype) / other


def run_hoist(graph: Graph) -> int:
    return hoist_casts(graph, HoistConfig(Policy.of(FORCE), lambda *_: None))


def run_fold(graph: Graph) -> int:
    return fold_scales(graph, Policy.of(FORCE))


def run_merge_amaxes(graph: Graph) -> int:
    mark_amax_reductions(graph)
    return merge_amax_reductions(graph)


PARTS: dict[Part, Pass] = {
    gathered_twice: merge_collectives,
    summed: merge_collectives,
    gathered_and_summed: merge_collectives,
    summed_twice: merge_collectives,
    reduced_twice: scatter_first,
    scaled: scale_shards,
    exchanged: decompose_collectives,
    repeated: send_once,
    ring: merge_collectives,
    sorted_back: gather_sorted_rows,
    counted: keep_exchange_sizes,
    cast_gathered: run_hoist,
    scaled_product: run_fold,
    two_scales: run_merge_amaxes,
}


class AnyRank(OneRank):
    """Also runs what is decomposed, as the collective that it becomes, and float8 in fp64.

    Other ranks have the same rows in another order: their amax is the same, and bytes of float8 are gathered as they are. Casts
    to fp32 are casts to fp64.
    """

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map_only(torch.dtype, lambda dtype: F64 if dtype is torch.float32 else dtype, (args, kwargs))
        if target is torch.ops.aten._scaled_mm.default:
            lhs, rhs, lhs_scale, rhs_scale = args[:4]
            return ((lhs.double() @ rhs.double()) * lhs_scale * rhs_scale).to(torch.bfloat16)
        if target is c10d.all_gather_into_tensor.default:
            return torch.cat([args[0].roll(r, 0) for r in range(args[1])])
        if target is c10d.all_reduce.default and args[1] == "max":
            return args[0]
        if target is not torch.ops._dtensor.shard_dim_alltoall.default:
            return super().call_function(target, args, kwargs)
        x, gather_dim, shard_dim, _ = args
        stacked = torch.cat(x.chunk(RANKS, shard_dim))
        splits = [len(stacked) // RANKS] * RANKS
        exchanged = super().call_function(c10d.all_to_all_single.default, (stacked, splits, splits), {})
        return torch.cat(exchanged.chunk(RANKS), gather_dim)


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    with FakeRanks(RANKS).group():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        world = dist.group.WORLD
        assert world is not None
        GROUPS.update(world=world.group_name, **{name: mesh.get_group(name).group_name for name in ("outer", "inner")})
        yield
        GROUPS.clear()


def traced(function: Part) -> GraphModule:
    module = make_fx(function, tracing_mode="fake")(torch.randn(ROWS, WIDTH))
    for node in module.graph.nodes:
        if "all_to_all_single" in str(node.target) and node.meta["val"].dtype is torch.int64:
            for again in (node, *node.users):
                again.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    return module


def nested(*parts: Part) -> Part:
    def function(x: Tensor) -> Tensor:
        for part in parts:
            x = part(x)
        return x

    return function


def added(*parts: Part) -> Part:
    def function(x: Tensor) -> Tensor:
        return sum((part(x) for part in parts), torch.zeros_like(x))

    return function


def joint_pass(graph: Graph) -> int:
    JointPass(FORCE)(graph)
    return 1


def check(module: GraphModule, passes: tuple[Pass, ...], expected: Tensor) -> list[int]:
    """Run passes on a copy. Return the number of changes of each."""
    changed = copy.deepcopy(module)
    counts = []
    for run in passes:
        counts.append(run(changed.graph))
        changed.graph.lint()
    changed.recompile()
    torch.testing.assert_close(outputs(changed), expected, rtol=1e-8, atol=1e-8)
    return counts


def outputs(module: GraphModule) -> Tensor:
    """Run a graph of fp32 in fp64."""
    x = torch.randn(ROWS, WIDTH, dtype=F64, generator=torch.Generator().manual_seed(0))
    return AnyRank(module).run(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_each_part_is_changed(part: Part) -> None:
    module = traced(part)
    (count,) = check(module, (PARTS[part],), outputs(module))
    assert count > 0


SHORT = [reduced_twice, gathered_and_summed, scaled, ring, counted]
"""One part for each pass."""


@pytest.mark.tier("test")
@pytest.mark.parametrize("first", full_but(SHORT, PARTS), ids=lambda part: part.__name__)
def test_pairs(first: Part) -> None:
    for second, join in itertools.product(PARTS, (nested, added)):
        module = traced(join(first, second))
        expected = outputs(module)
        passes = list(dict.fromkeys((PARTS[first], PARTS[second])))
        for order in itertools.permutations(passes):
            counts = check(module, order, expected)
            # What is added gathers one tensor: merged with another, it may be read in ways that leave nothing to a later pass.
            # Amaxes behind another collective stay apart.
            is_behind = second is two_scales
            assert join is added or is_behind or all(counts), (first.__name__, second.__name__, counts)
        check(module, (joint_pass,), expected)


@pytest.mark.tier("full")
def test_triples() -> None:
    choices = random.Random(0)
    for _ in range(TRIPLES):
        parts = choices.choices(list(PARTS), k=3)
        module = traced(choices.choice((nested, added))(*parts))
        expected = outputs(module)
        passes = [*dict.fromkeys(PARTS[part] for part in parts)]
        for order in itertools.permutations(passes):
            check(module, order, expected)
        check(module, (joint_pass,), expected)
