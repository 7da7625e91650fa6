"""A block traced as it would be compiled: through Dynamo, AOTAutograd, its partitioner and our passes, up to the decisions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph, GraphModule, Node

from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.diff.graph_store import PlanGraphs
from ub_overlap.compiler.diff.joint_snapshot import SnapshotRecorder
from ub_overlap.compiler.options import Options
from ub_overlap.compiler.passes import JointPass, phase_of
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.rewrite.rewrite_graph import rewrite
from ub_overlap.compiler.select import Decided, decide
from ub_overlap.runtime.errors import UbOverlapError

from .models import Sizes, block_input, parallel_blocks
from .unmatched_time import Rest, rest_of


@dataclass(frozen=True, slots=True)
class Traced:
    """One graph: its plan, what it computes beside the plan's sites, and, where asked for, what a rewrite makes of it."""

    plan: Plan
    rest: Rest
    graphs: PlanGraphs | None = None


def trace(sizes: Sizes, options: Options, rewritten: bool = False) -> list[Traced]:
    """The forward and the backward graph of the blocks, in this order. UbOverlapError where this process has a process group
    already: the ranks that are planned for do not exist, and the default group has to be theirs. OptionError where a saved plan
    among the options does not fit. `rewritten`: with the graphs before and after; needs the extension, which has the ops."""
    if rewritten:
        from ub_overlap.runtime import ops

        ops.load()
    graphs: list[Traced] = []

    def compiled(gm: GraphModule, _inputs: list[Any]) -> Callable[..., Any]:
        decided = decide(gm.graph, options, phase_of(gm.graph), lambda *_: None)
        rest = rest_of(gm.graph, _taken(gm.graph, decided))
        plain = GraphModule(gm, copy.deepcopy(gm.graph)) if rewritten else gm  # what runs: there are no ranks to run ops with
        graphs.append(Traced(decided.plan, rest, _rewritten(gm.graph, decided, options) if rewritten else None))
        return compat.make_boxed_func(plain.forward)

    joint = JointPass(options)

    def partition(gm: GraphModule, *args: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        joint(gm.graph)
        gm.recompile()
        return compat.min_cut_rematerialization_partition(gm, *args, **kwargs)

    backend = compat.aot_autograd(fw_compiler=compiled, bw_compiler=compiled, partition_fn=partition)
    with _ranks(sizes.tp) as mesh, compat.caches_off(), compat.FakeTensorMode():
        blocks = parallel_blocks(sizes, mesh)
        try:
            out = torch.compile(blocks, backend=backend, fullgraph=True, dynamic=False)(block_input(sizes))
            out.sum().backward()
        except Exception as error:
            if isinstance(own := getattr(error, "inner_exception", None), UbOverlapError):
                raise own from None  # Dynamo's wrapping says nothing about a plan
            raise
    return graphs


def _rewritten(graph: Graph, decided: Decided, options: Options) -> PlanGraphs | None:
    watch = SnapshotRecorder(graph, decided.plan.phase, on=True)
    watch.before(decided.chosen)
    rewrite(graph, decided.chosen)
    taken = watch.after()
    return PlanGraphs(decided.plan.digest, decided.plan.phase, *taken) if taken else None


def _taken(graph: Graph, decided: Decided) -> set[Node]:
    """The nodes that the decisions account for: members of sites, and the matmuls of those that are left alone."""
    names = {m for d in decided.plan.decisions for m in d.matmuls}
    return {n for chosen in decided.chosen for n in chosen.site.members} | {n for n in graph.nodes if n.name in names}


@contextmanager
def _ranks(count: int) -> Iterator[DeviceMesh]:
    """A mesh of `count` ranks, of which this process plays the first and the others do not exist."""
    if dist.is_initialized():
        raise UbOverlapError(
            "planning needs a process without a process group",
            where="ub_overlap.compiler.planner",
            got=f"a {dist.get_backend()} group of {dist.get_world_size()} ranks",
            fix="plan in a process of its own: python -m ub_overlap plan ...",
        )
    dist.init_process_group("fake", store=compat.FakeStore(), rank=0, world_size=count)
    torch.compiler.reset()
    try:
        yield DeviceMesh("cpu", torch.arange(count), mesh_dim_names=("tp",))
    finally:
        torch.compiler.reset()
        dist.destroy_process_group()
