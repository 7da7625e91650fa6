"""The passes on a graph that the user has traced, without torch.compile.

    traced = make_fx(step)(*inputs)                                one graph: forward, loss, backward
    ub_overlap.apply_passes(traced, inputs, parameters=range(n))   JointPass, then RewritePass, in place
    traced(*inputs)                                                as FX, in a CUDA graph, or through Inductor

The partitioner, which cuts a joint graph in two, does not run. So options that change what forward saves, or that cut a graph,
are errors here, as are those of a compiler.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule

from ub_overlap.runtime.errors import OptionError

from ..backend import parse_and_load
from ..diff.joint_snapshot import JointSnapshot
from ..graph.graph_inputs import GraphInputs
from ..graph.joint_graph import first_of_backward, is_in_backward, mark_halves
from ..graph.traced_graph import PLAN, check_traced_graph, compute_values, hoist_attributes
from ..inductor import apply_bug_patches, register_lowerings
from ..options import Options
from ..passes import JointPass, RewritePass
from ..plan.phase import PHASES, Phase
from .in_place import replace_writes

WHERE = "ub_overlap.apply_passes"

_USE_COMPILE = "leave it out, or use torch.compile(model, backend='ub_overlap', options=...)"


def apply_passes(
    graph_module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    parameters: Iterable[int] | None = None,
    phase: Phase | None = None,
) -> GraphModule:
    """Overlap the collectives of an ATen graph that was traced without torch.compile. Return the module, changed in place.

        ub_overlap.apply_passes(make_fx(step)(w1, w2, x), (w1, w2, x), parameters=[0, 1])

    `graph_module`: ATen ops and functional collectives, as of make_fx. `example_inputs`: a tensor, real or fake, or a number
    for each placeholder. They give `meta["val"]` to graphs that lack it; real ones are not changed. `options`: as of
    backend="ub_overlap". `parameters`: positions of the inputs that are parameters. Their gathers may start early and are
    bucketed. None: those that are nn.Parameters; without any, all floating-point inputs. Parameters that the graph holds as
    attributes always count. `phase`: "forward", "backward" or "step" (forward, loss and backward in one graph). None: by the
    marks that autograd leaves in a trace, and by ops that are named backward.

    All ranks of the groups must call it with equal graphs. Run the result under torch.no_grad: the graph holds the backward.
    In-place ops become ops that return new tensors with the same strides, also assignments to slices. OptionError for a graph
    of another kind, one that was rewritten before, one that writes to memory which is read through other views later, or in a
    higher-order op, and for options that one graph cannot follow: memory_budget, defer_weight_gradients, fp8,
    split_tokens="force", mode, and those of Inductor.
    """
    ours, theirs = parse_and_load(options)
    _check_options(ours, theirs)
    inputs = list(example_inputs)
    check_traced_graph(graph_module, inputs, WHERE)
    graph = graph_module.graph
    phase = _checked_phase(graph_module, phase, ours)
    facts = GraphInputs.of_traced(graph, inputs, _checked_positions(parameters, len(inputs)))
    hoist_attributes(graph)
    compute_values(graph_module, inputs, WHERE)
    replace_writes(graph, WHERE)
    if phase == "step":
        mark_halves(graph)
    apply_bug_patches()
    register_lowerings()
    snapshots = JointSnapshot()
    ours = replace(ours, inner="aot_eager")  # the caller compiles the result, or runs it as it is
    JointPass(ours, facts, snapshots)(graph)
    rewrite = RewritePass(ours, facts, snapshots, phase)
    rewrite(graph)
    graph.lint()
    graph_module.recompile()
    graph_module.meta[PLAN] = rewrite.plan.digest if rewrite.plan else ""
    return graph_module


def _check_options(ours: Options, theirs: Mapping[str, Any]) -> None:
    """Raise OptionError for an option that one graph cannot follow."""
    reasons = {
        "memory_budget": (ours.memory_budget is not None, "what forward saves is fixed in the traced graph"),
        "defer_weight_gradients": (ours.defer_weight_gradients, "it cuts a backward graph in two, and the result is one graph"),
        "fp8": (ours.fp8.is_on, "it changes what forward saves for backward, which is fixed in the traced graph"),
        "split_tokens": (ours.split_tokens == "force", "Dynamo chooses the halves of a tokenwise layer while it traces"),
        "mode": (ours.mode is not None, "nothing is compiled here; it is an option of Inductor"),
    }
    for name, (is_set, why) in reasons.items():
        if is_set:
            raise OptionError(
                what=f"ub_overlap.apply_passes cannot follow the option {name!r}: {why}",
                where=f"{WHERE}(..., options=...)",
                got=f"{name}={getattr(ours, name)!r}",
                fix=_USE_COMPILE,
            )
    if theirs:
        raise OptionError(
            what="ub_overlap.apply_passes compiles nothing, so it takes no options of Inductor",
            where=f"{WHERE}(..., options=...)",
            got=", ".join(f"{name}={value!r}" for name, value in theirs.items()),
            fix="pass them to the compiler of the result",
        )


def _checked_phase(gm: GraphModule, phase: str | None, ours: Options) -> Phase:
    """Return the phase of a graph, found or as the user says."""
    if phase not in (None, *PHASES):
        raise OptionError(
            "unknown phase", where=WHERE, got=f"phase={phase!r}", expected=f"None, {', '.join(map(repr, PHASES))}"
        )
    if phase is None:
        takes_tangents = any(n.name.startswith("tangents") for n in gm.graph.find_nodes(op="placeholder"))
        phase = "backward" if takes_tangents else "step" if first_of_backward(gm.graph) is not None else "forward"
    if phase == "step" and ours.reduce_dtype is not None and not any(map(is_in_backward, gm.graph.nodes)):
        raise OptionError(
            what="reduce_dtype needs to know which reductions are of gradients, and the graph has no marks of autograd",
            where=f"{WHERE}(..., options=...)",
            got=f"reduce_dtype={ours.reduce_dtype!r}, and no node with meta['autograd_backward']",
            fix="leave reduce_dtype out, or mark the nodes of backward when tracing, as torchtitan's graph_trainer does",
        )
    return phase  # type: ignore[return-value]


def _checked_positions(parameters: Iterable[int] | None, inputs: int) -> tuple[int, ...] | None:
    """Return `parameters` as sorted positions. `inputs`: the number of inputs."""
    if parameters is None:
        return None
    try:
        positions = sorted(set(parameters))
        is_valid = all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < inputs for i in positions)
    except TypeError:
        positions, is_valid = [], False
    if not is_valid:
        raise OptionError(
            what="parameters are positions of inputs",
            where=f"{WHERE}(..., parameters=...)",
            got=repr(parameters)[:200],
            expected=f"numbers from 0 to {inputs - 1}",
            fix="parameters=range(n) where the graph takes n parameters first",
        )
    return tuple(positions)


def plan_digest(model: Any) -> str | None:
    """Return the digest of the plan of a graph that `apply_passes` rewrote, "" for one without collectives; None for others."""
    return model.meta.get(PLAN) if isinstance(model, torch.fx.GraphModule) else None
