"""Trace a block as it would be compiled: through Dynamo, AOTAutograd, its partitioner and the passes, up to the decisions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph, GraphModule, Node

from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.diff.graph_store import PlanGraphs
from ub_overlap.compiler.diff.joint_snapshot import SnapshotRecorder
from ub_overlap.compiler.graph.graph_inputs import GraphInputs
from ub_overlap.compiler.options import Options
from ub_overlap.compiler.passes import JointPass, phase_of, prepare_sites
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.plan.reasons import Kind
from ub_overlap.compiler.rewrite.part_strides import Outputs
from ub_overlap.compiler.rewrite.rewrite_graph import rewrite
from ub_overlap.compiler.rewrite.weight_gradients import separate_weight_gradients
from ub_overlap.compiler.select.decide import Decided, decide
from ub_overlap.runtime import settings
from ub_overlap.runtime.errors import UbOverlapError

from .context_attention import balance_attention, context_of
from .models import block_input, parallel_blocks
from .sizes import PlannedBlock
from .unmatched_time import UnmatchedWork, find_unmatched_work


@dataclass(frozen=True, slots=True)
class TracedGraph:
    """One graph: its plan, its other work, and, if requested, the graphs before and after the rewrite."""

    plan: Plan
    rest: UnmatchedWork
    parallelisms: dict[str, str]
    """The kind of parallelism ("TP") that each site serves, by its id."""
    graphs: PlanGraphs | None = None


def trace(
    sizes: PlannedBlock, options: Options, rewritten: bool = False, progress: Callable[[str], None] = lambda _: None
) -> list[TracedGraph]:
    """Trace the blocks and return their forward and backward graph, in this order; with defer_weight_gradients three graphs.

    `rewritten`: include the graphs before and after the rewrite; needs the extension, which has the ops. `progress`: is called
    with each step of the work. UbOverlapError where this process already has a process group: the default group must be that
    of the fake ranks. OptionError where a saved plan in the options does not fit.
    """
    if rewritten:
        from ub_overlap.runtime import ops

        ops.load()
    graphs: list[TracedGraph] = []

    parameters: tuple[int, ...] = ()  # positions among the inputs of Dynamo's graph

    def note(graph: Graph) -> None:
        phase = phase_of(graph)
        progress(f"selecting strategies of the {phase} graph")
        of_graph = GraphInputs(parameters=parameters).parameters_in(graph)
        if sizes.cp > 1:
            balance_attention(graph, sizes.cp_form)
        prepare_sites(graph, options, of_graph)
        decided = decide(graph, options, phase, lambda *_: None, parameters=of_graph)
        rest = find_unmatched_work(graph, _site_nodes(graph, decided))
        groups = {f"g{i}": name for i, name in enumerate(decided.groups)}
        parallelisms = {d.id: meshes.parallelism_of(groups.get(d.group, ""), d.kind) for d in decided.plan.decisions}
        graphs.append(TracedGraph(decided.plan, rest, parallelisms, _rewritten(graph, decided, options) if rewritten else None))

    def compiled(gm: GraphModule, _inputs: list[Any]) -> Callable[..., Any]:
        own = GraphModule(gm, copy.deepcopy(gm.graph))  # `gm` runs: fake ranks cannot run the ops
        is_cut = options.defer_weight_gradients and phase_of(gm.graph) == "backward"
        parts = separate_weight_gradients(own, parameters) if is_cut else None
        for graph in (own.graph,) if parts is None else (parts.first.graph, parts.second.graph):
            note(graph)
        return compat.make_boxed_func(gm.forward)

    joint = JointPass(options)

    def partition(gm: GraphModule, *args: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        progress("partitioning the joint graph")
        return joint.partition(gm, *args, **kwargs)

    compile_graph = compat.aot_autograd(fw_compiler=compiled, bw_compiler=compiled, partition_fn=partition)

    def backend(gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        nonlocal parameters
        parameters = GraphInputs.of(inputs).parameters
        return compile_graph(gm, inputs)

    with _fake_ranks(sizes) as meshes, compat.caches_off(), compat.FakeTensorMode(), context_of(sizes.cp_form):
        progress("building the block")
        blocks = parallel_blocks(sizes, meshes.dense, meshes.experts)
        progress("tracing forward and backward")
        try:
            out = torch.compile(blocks, backend=backend, fullgraph=True, dynamic=False)(block_input(sizes))
            out.sum().backward()
        except Exception as error:
            if isinstance(own := getattr(error, "inner_exception", None), UbOverlapError):
                raise own from None  # Dynamo's wrapper adds no information about a plan
            raise
    return graphs


def _rewritten(graph: Graph, decided: Decided, options: Options) -> PlanGraphs | None:
    recorder = SnapshotRecorder(graph, decided.plan.phase, on=True)
    recorder.before(decided.chosen)
    outputs = Outputs.of(graph, decided.plan.phase == "backward", restores_strides=True)
    rewrite(graph, decided.chosen, outputs, layout=decided.layout)
    snapshots = recorder.after()
    return PlanGraphs(decided.plan.digest, decided.plan.phase, *snapshots) if snapshots else None


def _site_nodes(graph: Graph, decided: Decided) -> set[Node]:
    """Return the nodes that the decisions cover: members of sites, and the matmuls of sites that are not overlapped."""
    names = {m for d in decided.plan.decisions for m in d.matmuls}
    return {n for chosen in decided.chosen for n in chosen.site.members} | {n for n in graph.nodes if n.name in names}


@dataclass(frozen=True, slots=True)
class _Meshes:
    """Meshes of the same ranks. Dims: of `dense` "dp", "cp" and "tp", of `experts` "replicas" and "ep"."""

    dense: DeviceMesh
    experts: DeviceMesh | None

    def parallelism_of(self, group: str, kind: Kind) -> str:
        """Return the kind of parallelism, "TP", that a collective of a group (its c10d name) serves.

        Dims of all ranks are one group: experts exchange rows, the others do not.
        """
        meshes = filter(None, (self.dense, self.experts))
        dims = [d for mesh in meshes for d in mesh.mesh_dim_names or () if mesh.get_group(d).group_name == group]
        if kind is Kind.ALL_TO_ALL and "ep" in dims:
            return "EP"
        if not dims and "cp" in (self.dense.mesh_dim_names or ()):  # weights are sharded over two dims
            return "DP"
        return {"": "", "replicas": "DP"}.get(dim := next(iter(dims), ""), dim.upper())


@contextmanager
def _fake_ranks(sizes: PlannedBlock) -> Iterator[_Meshes]:
    """Yield meshes of fake ranks on their hosts. This process is the first."""
    if dist.is_initialized():
        raise UbOverlapError(
            "planning needs a process without a process group",
            where="ub_overlap.tools.planner",
            got=f"a {dist.get_backend()} group of {dist.get_world_size()} ranks",
            fix="plan in a separate process: python -m ub_overlap plan ...",
        )
    dist.init_process_group("fake", store=compat.FakeStore(), rank=0, world_size=sizes.stage_ranks)
    torch.compiler.reset()
    dims = {name: size for name, size in (("dp", sizes.dp), ("cp", sizes.cp), ("tp", sizes.tp)) if size > 1} or {"tp": 1}
    before = settings.current()
    try:
        settings.keep(replace(before, hosts=str(sizes.ranks_per_host) if sizes.stage_ranks > sizes.ranks_per_host else ""))
        ranks = torch.arange(sizes.stage_ranks)
        dense = DeviceMesh("cpu", ranks.view(*dims.values()), mesh_dim_names=tuple(dims))
        names = ("replicas", "ep")
        experts = DeviceMesh("cpu", ranks.view(-1, sizes.ep), mesh_dim_names=names) if sizes.experts > 1 else None
        yield _Meshes(dense, experts)
    finally:
        settings.keep(before)
        torch.compiler.reset()
        dist.destroy_process_group()
