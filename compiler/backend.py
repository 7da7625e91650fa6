"""The torch.compile backend.

    torch.compile(model, backend="ub_overlap", options={"overlap": "force"})

Dynamo's graph goes to Inductor with our two passes at its hooks, or with inner="aot_eager" through AOTAutograd, which then
calls the same passes. All features of Inductor remain available; see docs/explanation/architecture.md for the folders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from ub_overlap import _torch_compat as compat
from ub_overlap.runtime import ops
from ub_overlap.runtime.errors import OptionError
from ub_overlap.runtime.session import plan_graphs

from .diff.compare_ranks import explain_difference
from .diff.joint_snapshot import JointSnapshot
from .graph.graph_inputs import GraphInputs
from .graph.in_flight_inputs import find_in_flight, landed_examples, with_landed_inputs
from .graph.source_location import input_names
from .inductor import apply_bug_patches, estimate_own_ops, ordering_options, register_lowerings, require_cxx_compiler
from .inductor.backward_parts import inner_compiler
from .options import Options, parse
from .passes import HOOKS, JointPass, RewritePass
from .reports import cached_graphs
from .rewrite.weight_gradients import separate_weight_gradients

MOST_FUSED_OPERATIONS = 100
"""Operations up to which Inductor computes a value in its readers' kernels, in float8 graphs. By default it stores a value of
more than 30, and so a 16-bit or fp32 copy of an activation's gradient that is cast to float8."""


def ub_overlap(
    gm: GraphModule,
    example_inputs: list[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
    region: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo; torch.compile finds this function under the name "ub_overlap".

    `options`: ours (compiler/options.py), and Inductor's by name. `mode`: Inductor's. torch does not accept it together with
    options, which take it as {"mode": ...} instead. `region`: the name that Inductor gives the code. OptionError for invalid
    options.
    """
    if in_flight := find_in_flight(example_inputs):
        compiled = ub_overlap(gm, landed_examples(example_inputs, in_flight), options=options, mode=mode, region=region)
        return with_landed_inputs(compiled, in_flight)
    ours, theirs = parse_and_load(options)
    if ours.inner == "aot_eager":
        return _compile_aot_eager(gm, example_inputs, ours)
    require_cxx_compiler(example_inputs, theirs)
    facts = GraphInputs.of(example_inputs)
    own_passes = _make_passes(ours, facts, input_names(gm.graph))
    patches = _inductor_options(ours, theirs, mode or ours.mode, own_passes)
    more = {"inner_compile": inner_compiler(facts.parameters)} if ours.defer_weight_gradients else {}
    more |= {"compile_region_name": region} if region else {}
    rewrite = own_passes[1]
    rewrite.key = cached_graphs.key_of(gm, example_inputs, rewrite.uuid())
    compiled = compat.compile_fx(gm, example_inputs, config_patches=patches, **more)
    if not rewrite.has_run:
        cached_graphs.remember_cached(rewrite.key, ours.overlap)
    return compiled


def _make_passes(ours: Options, inputs: GraphInputs, names: Sequence[str] = ()) -> tuple[JointPass, RewritePass]:
    """Return the passes of one graph of Dynamo, which share its snapshots. `names`: of its inputs, for reports."""
    snapshot = JointSnapshot(names)
    return JointPass(ours, inputs, snapshot), RewritePass(ours, inputs, snapshot)


def passes(options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return options of Inductor that run our passes, for programs that keep backend="inductor".

        torch.compile(model, options=ub_overlap.passes({"overlap": "force"}))

    `options`: as of backend="ub_overlap", except for inner. Inductor's own are returned too, with the options of "mode".
    Passes that the user has at the same hooks run before ours. OptionError for invalid options.

    The passes see graphs, not the inputs of the model. They therefore decide as follows:

    - Weights are not known as parameters. fp8 casts them in every call, as with {"weights": "per_call"}.
    - DTensor inputs whose ranks hold different sizes are not known. A gather with other readers is not repeated for float8.
      fp8 of such weights may differ between ranks; the first call then raises PlanMismatchError.
    - Inputs whose collective is in flight are not waited for: torch 2.13 loses their gradient, or fails. Call
      `torch.distributed._functional_collectives.wait_tensor` on them before.
    - A graph in which nothing is overlapped is in no report while its code comes from torch's compile cache.
    - The hints of symbolic sizes are not part of cache keys. A cached graph may have strategies chosen for other sizes.
    """
    ours, theirs = parse_and_load(options)
    if ours.inner != "inductor":
        raise OptionError(
            what="ub_overlap.passes needs Inductor",
            where="ub_overlap.passes(options)",
            got=f"inner={ours.inner!r}",
            expected="inner='inductor'",
            fix="drop inner, or use torch.compile(model, backend='ub_overlap', options=...)",
        )
    if ours.defer_weight_gradients:
        raise OptionError(
            what="ub_overlap.passes cannot cut a backward graph in two",
            where="ub_overlap.passes(options)",
            got="defer_weight_gradients=True",
            fix="use torch.compile(model, backend='ub_overlap', options=...)",
        )
    return _inductor_options(ours, theirs, ours.mode, _make_passes(ours, GraphInputs(is_known=False)))


def parse_and_load(options: Mapping[str, Any] | None) -> tuple[Options, dict[str, Any]]:
    """Return (our options, Inductor's) after loading what compiled graphs need. OptionError for invalid options."""
    ours, theirs = parse(options, compat.inductor_option_names())
    ops.load()
    plan_graphs.install(explain_difference)
    return ours, theirs


def _inductor_options(
    ours: Options, theirs: dict[str, Any], mode: str | None, own_passes: tuple[JointPass, RewritePass]
) -> dict[str, Any]:
    """Return Inductor's options: those of its mode, the user's, and our passes at its hooks after the user's passes."""
    apply_bug_patches()
    register_lowerings()
    patches = {**(compat.list_mode_options(mode) if mode else {}), **theirs}
    if ours.fp8.is_on:
        patches.setdefault("realize_opcount_threshold", MOST_FUSED_OPERATIONS)
    for name, value in ordering_options().items():  # the pass may change them for one graph (keep_order)
        patches.setdefault(name, value)
    patches |= estimate_own_ops(patches)
    for hook, own in zip(HOOKS, own_passes, strict=True):
        patches[hook] = compat.chained(compat.user_pass(hook, patches), own)
    return patches


def _compile_aot_eager(gm: GraphModule, example_inputs: list[Any], ours: Options) -> Callable[..., Any]:
    inputs = GraphInputs.of(example_inputs)
    joint, rewrite = _make_passes(ours, inputs, input_names(gm.graph))

    def compile_graph(graph: GraphModule, _inputs: list[Any]) -> Callable[..., Any]:
        rewrite(graph.graph)
        graph.recompile()
        return compat.make_boxed_func(graph.forward)

    def compile_backward(graph: GraphModule, given: list[Any]) -> Callable[..., Any]:
        parts = separate_weight_gradients(graph, inputs.parameters) if ours.defer_weight_gradients else None
        if parts is None:
            return compile_graph(graph, given)
        return parts.joined(compile_graph(parts.first, given), compile_graph(parts.second, []))

    def compile_inference(graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        joint(graph.graph)
        return compile_graph(graph, inputs)

    backend = compat.aot_autograd(
        fw_compiler=compile_graph,
        bw_compiler=compile_backward,
        inference_compiler=compile_inference,
        partition_fn=joint.partition,
    )
    return backend(gm, example_inputs)
