"""The torch.compile backend.

    torch.compile(model, backend="ub_overlap", options={"overlap": "force"})

Dynamo's graph goes to Inductor with our two passes at its hooks (or, with inner="aot_eager", through AOTAutograd with the
same passes called by hand). Everything Inductor can do it still does; see docs/explanation/architecture.md for the folders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

from ub_overlap import _torch_compat as compat
from ub_overlap.runtime import ops
from ub_overlap.runtime.session import plan_graphs

from .diff.compare_ranks import explain as explain_ranks
from .diff.joint_snapshot import JointSnapshot
from .graph.graph_inputs import GraphInputs
from .options import Options, parse
from .passes import JointPass, RewritePass


def ub_overlap(
    gm: GraphModule, example_inputs: list[Any], *, options: dict[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """The entry point that torch.compile finds under "ub_overlap".

    `options`: ours (compiler/options.py) and Inductor's by name. `mode`: Inductor's; torch allows it only without options,
    beside which it is written options={"mode": ...}. OptionError for anything else.
    """
    ours, theirs = parse(options, compat.inductor_option_names())
    ops.load()
    plan_graphs.install(explain_ranks)
    if ours.inner == "aot_eager":
        return _aot_eager(gm, example_inputs, ours)
    return _inductor(gm, example_inputs, ours, theirs, mode or ours.mode)


def _inductor(
    gm: GraphModule, example_inputs: list[Any], ours: Options, theirs: dict[str, Any], mode: str | None
) -> Callable[..., Any]:
    compat.mend_fused_reads()
    if ours.fp8.is_on:
        compat.never_reused(torch.ops.ub_overlap.fp8_weight.default)
    patches = {**(compat.list_mode_options(mode) if mode else {}), **theirs}
    inputs, trail = GraphInputs.of(example_inputs), JointSnapshot()
    own_passes = (JointPass(ours, inputs, trail), RewritePass(ours, inputs, trail))
    for hook, own in zip(("joint_custom_pre_pass", "post_grad_custom_pre_pass"), own_passes, strict=True):
        patches[hook] = compat.chained(compat.user_pass(hook, patches), own)
    return compat.compile_fx(gm, example_inputs, config_patches=patches)


def _aot_eager(gm: GraphModule, example_inputs: list[Any], ours: Options) -> Callable[..., Any]:
    given, trail = GraphInputs.of(example_inputs), JointSnapshot()
    joint, rewrite = JointPass(ours, given, trail), RewritePass(ours, given, trail)

    def compiled(graph: GraphModule, _inputs: list[Any]) -> Callable[..., Any]:
        rewrite(graph.graph)
        graph.recompile()
        return compat.make_boxed_func(graph.forward)

    def inference(graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        joint(graph.graph)
        return compiled(graph, inputs)

    def partition(graph: GraphModule, *args: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        joint(graph.graph)
        graph.recompile()
        return compat.min_cut_rematerialization_partition(graph, *args, **kwargs)

    backend = compat.aot_autograd(
        fw_compiler=compiled, bw_compiler=compiled, inference_compiler=inference, partition_fn=partition
    )
    return backend(gm, example_inputs)
