"""The two passes that torch runs for us. Their cache keys hold everything that they depend on.

    JointPass    on the joint graph, before the partitioner (inference: on the only graph): what is computed and saved
    RewritePass  on the forward and on the backward graph, before Inductor folds mm + add: sites -> plan -> ops

Inductor calls them at its hooks (`HOOKS`). With inner="aot_eager" the backend calls them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ub_overlap import _torch_compat as compat
from ub_overlap.runtime import settings
from ub_overlap.runtime.session import host_groups, plan_announcements, transport

from .cost.policy import Policy
from .cost.profile_lookup import signature
from .diff.joint_snapshot import JointSnapshot, SnapshotRecorder
from .fp8.hoist.fold_scales import fold_scales
from .fp8.hoist.hoist_casts import hoist_casts
from .fp8.hoist.hoist_legality import HoistConfig
from .fp8.insert.insert_casts import insert_casts
from .fp8.insert.insert_config import InsertConfig
from .fp8.operand_layout import pin_operand_layouts
from .fp8.recipe import recipe_of
from .fp8.state.cached_weights import cast_neighbors, copy_returned_casts
from .graph.arrange import note_places, restore_places
from .graph.dtensor_sizes import sizes_by_placeholder
from .graph.functional_copies import drop_copies
from .graph.graph_inputs import GraphInputs
from .graph.joint_graph import drop_unread
from .graph.repeated_waits import drop_repeated_waits
from .graph.source_location import calling_line
from .graph.traced_graph import is_planned
from .inductor import keep_order
from .joint.activation_memory import apply_save_policy
from .joint.decompose_collectives import decompose_collectives, may_decompose
from .joint.exchange_sizes import keep_exchange_sizes, may_keep_sizes
from .joint.merge.merge_amax_reductions import merge_amax_reductions
from .joint.merge.merge_collectives import may_merge, merge_collectives
from .joint.repeats.send_once import may_send_once, send_once
from .joint.scale_shards import may_scale_shards, scale_shards
from .joint.scatter_first import mesh_signature, scatter_first
from .joint.sorted_rows import gather_sorted_rows, may_gather_sorted_rows
from .match.amax_reductions import mark_amax_reductions
from .match.site import Fused
from .options import Options
from .plan.phase import Phase
from .plan.plan import Plan
from .reports import cached_graphs
from .reports.history import HISTORY
from .reports.summary import announce_plan
from .rewrite.part_strides import Outputs
from .rewrite.rewrite_graph import rewrite
from .rewrite.sibling_matmuls import pack_siblings
from .select.decide import decide
from .unmatched import report_unmatched
from .windows.host_reads import issue_compute_first, read_together
from .windows.pair_exchanges import pair_exchanges
from .windows.widen import widen_windows

log = logging.getLogger(__name__)

HOOKS = ("joint_custom_pre_pass", "post_grad_custom_pre_pass")
"""Inductor's options that take JointPass and RewritePass."""


@functools.cache
def _sources() -> str:
    """Return a hash of every Python file that graphs depend on, so that another version never reuses an old graph."""
    import ub_overlap.runtime

    folders = [Path(__file__).parent, Path(ub_overlap.runtime.__file__).parent]
    return compat.hash_of_files([Path(compat.__file__), *(p for f in folders for p in sorted(f.rglob("*.py")))])


def phase_of(graph: Graph) -> str:
    """Return "backward" for a graph that takes tangents or comes from compiled autograd, else "forward" (also inference)."""
    takes_tangents = any(n.op == "placeholder" and n.name.startswith("tangents") for n in graph.nodes)
    return "backward" if takes_tangents or compat.is_in_compiled_autograd() else "forward"


class _Pass(compat.custom_graph_pass()):  # type: ignore[misc]
    def __init__(
        self,
        options: Options,
        inputs: GraphInputs | None = None,
        joint_snapshot: JointSnapshot | None = None,
        phase: Phase | None = None,
    ) -> None:
        """`joint_snapshot`: shared by the passes of one graph. `phase`: of the graph; None: by its inputs."""
        super().__init__()
        self.options, self.inputs, self.phase = options, inputs or GraphInputs(), phase
        self.joint_snapshot = joint_snapshot or JointSnapshot()

    def uuid(self) -> Any:
        """Return the cache key; None turns caches off."""
        host_groups.name_host_groups()  # a cached graph may hold their names
        if not self.options.is_cacheable:
            return None
        profiles = signature(self.options.profile, tuple(sorted(transport.executor_devices())))
        merges = settings.current().merge_collectives
        dims = mesh_signature() if self.options.scatter_first else ()
        key = (
            self.options.key(), merges, astuple(self.inputs), torch.__version__, transport.transport_signature(), profiles,
            compat.is_in_compiled_autograd(), dims,
        )  # fmt: skip
        return (type(self).__name__, _sources(), *key)


class JointPass(_Pass):
    """Decompose, merge and reorder collectives, read sorted rows, hoist float8 casts, and apply the memory budget."""

    def __call__(self, graph: Graph) -> None:
        if any(map(is_planned, graph.nodes)):  # apply_passes has rewritten it; windows are placed
            note_places(graph)  # Inductor reorders a graph of inference between the passes
            return
        drop_repeated_waits(graph)
        policy = Policy.of(self.options)
        recorder = SnapshotRecorder(graph, "joint", settings.current().snapshots, self.joint_snapshot.input_names)
        changes: dict[str, int] = {}
        for what, change in self._changes(graph, policy):
            if not changes:
                recorder.before()
            changes[what] = change()
        mark_amax_reductions(graph)
        shards = apply_save_policy(graph, self.options, policy)
        self.joint_snapshot.joint = recorder.after() if any(changes.values()) else None
        if any(changes.values()) or shards:
            graph.lint()
            counts = "".join(f"{count} {what}, " for what, count in changes.items())
            log.info("joint graph: %s%d gathers keep the shard", counts, shards)

    def _changes(self, graph: Graph, policy: Policy) -> Iterator[tuple[str, Callable[[], int]]]:
        """Yield the changes that the graph may need, each as (what is changed, change it and return how many).

        Each is decided on the graph that the changes before have left: none holds a node, or a fact, across another.
        """
        overlaps = self.options.overlap != "off"
        reforms = overlaps and settings.current().merge_collectives  # collectives are merged, and sums changed with them
        if overlaps and may_decompose(graph):
            yield "ops with collectives inside", partial(decompose_collectives, graph)
        if reforms and may_send_once(graph, policy.threshold):
            yield "collectives without repeats", partial(send_once, graph, policy.threshold)
        if overlaps and may_keep_sizes(graph):
            yield "sizes of all_to_alls that backward keeps", partial(keep_exchange_sizes, graph)
        if reforms and may_gather_sorted_rows(graph):
            yield "scatters of sorted rows that read", partial(gather_sorted_rows, graph)
        if reforms and may_merge(graph):
            yield "collectives merged", partial(merge_collectives, graph)
        if overlaps and may_scale_shards(graph):
            yield "gathers of scaled shards", partial(scale_shards, graph)
        if self.options.scatter_first:
            yield "all_reduces behind their reduce_scatter", partial(scatter_first, graph)
        has_float8 = _has_float8(graph)  # of the program: casts that are inserted have their place already
        if self.options.fp8.is_on:
            yield "matmuls cast to float8", partial(insert_casts, graph, self._insert_config(graph, policy))
        if overlaps and has_float8:
            may_be_uneven = bool(self.inputs.shards) or not self.inputs.is_known
            hoist = HoistConfig(policy, transport.unsupported_reason, may_be_uneven)
            yield "gathers after their casts", partial(hoist_casts, graph, hoist)
            yield "matmuls with folded scales", partial(fold_scales, graph, policy)
        if reforms and _has_float8(graph):
            yield "all_reduces of amax merged", partial(merge_amax_reductions, graph)

    def partition(self, gm: GraphModule, *args: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        """Change a joint graph and cut it in two, as AOTAutograd's `partition_fn`."""
        self(gm.graph)
        gm.recompile()
        return compat.min_cut_rematerialization_partition(gm, *args, **kwargs)

    def _insert_config(self, graph: Graph, policy: Policy) -> InsertConfig:
        """Return the settings of float8 casts for one graph."""
        options, inputs = self.options, self.inputs
        devices = {
            v.device.type for n in graph.find_nodes(op="placeholder") if isinstance(v := n.meta.get("val"), torch.Tensor)
        }
        device = "cuda" if "cuda" in devices else "cpu"
        profile = policy.profile(None, device) if policy.is_weighed(device) else None
        return InsertConfig(
            recipe_of(options.fp8.recipe),
            backward=options.fp8.products == "all",
            filter=options.fp8.filter,
            profile=profile,
            state=options.fp8.state,
            cached_weights=inputs.parameters_in(graph) if options.fp8.weights == "cached" else set(),
            verify=options.verify,
            uneven_inputs=sizes_by_placeholder(graph, inputs.shards),
        )


def _has_float8(graph: Graph) -> bool:
    return bool(graph.find_nodes(op="call_function", target=torch.ops.aten._scaled_mm.default))


def prepare_sites(graph: Graph, options: Options, parameters: Collection[Node] | None) -> None:
    """Change a graph before its sites are found: drop waits and copies, pair exchanges, widen narrow windows, and read numbers
    together.

    `parameters`: as in `Window.is_at_the_edge`.
    """
    drop_unread(graph)
    drop_repeated_waits(graph)
    drop_copies(graph)
    policy = Policy.of(options)
    pair_exchanges(graph, policy)
    widen_windows(graph, policy, parameters)
    read_together(graph, policy)
    issue_compute_first(graph, policy)


class RewritePass(_Pass):
    """Find sites, decide, record the plan, and rewrite the graph."""

    _calling_line = ""
    plan: Plan | None = None
    """Of the last graph; None where it has no collectives."""
    has_run = False
    key = ""
    """Of the graph of Dynamo, for processes that find its code in a cache (reports/cached_graphs.py)."""

    def __call__(self, graph: Graph) -> None:
        self.has_run = True
        host_groups.name_host_groups()
        if any(map(is_planned, graph.nodes)):  # apply_passes has rewritten it; windows are placed
            restore_places(graph)
            if self.options.inner == "inductor":
                keep_order()
            return
        if self.options.fp8.is_on:
            copy_returned_casts(graph)
        phase = self.phase or phase_of(graph)
        if phase != "backward" or not self._calling_line:  # backward may be compiled by autograd, far from the user's call
            self._calling_line = calling_line()
        parameters = self.inputs.parameters_in(graph) if self.inputs.knows_parameters else None
        neighbors = self.inputs.neighbors_in(graph)
        prepare_sites(graph, self.options, parameters)
        operands = neighbors
        if self.options.fp8.is_on:
            operands = {**neighbors, **cast_neighbors(graph, 1 + max((block for block, _ in neighbors.values()), default=-1))}
        decided = decide(graph, self.options, phase, transport.unsupported_reason, self._calling_line, operands, parameters)
        if not (decided.plan.decisions or decided.plan.casts):
            return
        self.plan = decided.plan
        HISTORY.record(decided.plan)
        cached_graphs.note(self.key, decided.plan)
        plan_announcements.announce_plan(decided.groups, decided.plan.graph, decided.plan.shared_digest)
        announce_plan(decided.plan, self.options.overlap)
        report_unmatched(decided.plan, self.options)
        names = self.joint_snapshot.input_names
        recorder = SnapshotRecorder(graph, decided.plan.phase, settings.current().snapshots, names)
        recorder.before(decided.chosen)
        outputs = Outputs.of(graph, phase == "backward", restores_strides=self.options.inner == "inductor")
        if decided.layout is not None and self.options.inner == "inductor":
            keep_order()
        rewrite(graph, decided.chosen, outputs, self.options.verify, decided.layout)
        is_fused = any(isinstance(site.site, Fused) for site in decided.chosen)
        if self.options.pack != "off" and is_fused and decided.layout is None:  # else matmuls have places in windows
            groups = pack_siblings(graph, neighbors, outputs, decided.plan.digest)
            log.info("%d groups of matmuls of few tokens are one matmul each", groups)
        if decided.plan.casts:
            pin_operand_layouts(graph)
        self.joint_snapshot.record(decided.plan, recorder.after())
