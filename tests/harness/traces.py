"""Graphs that torch traces: after AOTAutograd's partitioner, and as Inductor passes them to post_grad_custom_pre_pass."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._functorch.config
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.distributed.tensor import DTensor
from torch.fx import Graph, GraphModule

from tests.models.case import Case


@dataclass(frozen=True)
class Trace:
    """One graph. `phase` is "forward", "backward" or "inference"; `module` is a copy with all metadata."""

    phase: str
    text: str
    module: GraphModule


@dataclass
class Recorder:
    """A torch.compile backend that records graphs and runs them eagerly.

    `stage`: "aot" (graphs of the partitioner) or "inductor" (the same graphs at Inductor's first post-grad hook).
    """

    stage: str = "aot"
    traces: list[Trace] = field(default_factory=list)

    def __call__(self, module: GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        if self.stage == "inductor":
            from torch._inductor.compile_fx import compile_fx

            return compile_fx(module, inputs, inner_compile=self._inductor, config_patches={"fx_graph_cache": False})
        return aot_autograd(
            fw_compiler=self._plain("forward"),
            bw_compiler=self._plain("backward"),
            inference_compiler=self._plain("inference"),
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )(module, inputs)

    def _plain(self, phase: str) -> Callable[..., Any]:
        from functorch.compile import make_boxed_func

        def compiler(module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            self.record(phase, module.graph)
            return make_boxed_func(module.forward)

        return compiler

    def _inductor(self, module: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        """Run compile_fx_inner up to the hook, and return the unmodified graph."""
        from functorch.compile import make_boxed_func
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx_inner

        phase = "backward" if kwargs.get("is_backward") else "inference" if kwargs.get("is_inference") else "forward"
        untouched, before = copy.deepcopy(module), len(self.traces)

        def hook(graph: Graph) -> None:
            self.record(phase, graph)
            raise _Seen

        try:
            with config.patch(post_grad_custom_pre_pass=hook):
                compile_fx_inner(module, inputs, **kwargs)
        except Exception:
            if len(self.traces) == before:
                raise
        return make_boxed_func(untouched.forward)

    def record(self, phase: str, graph: Graph) -> None:
        owner = graph.owning_module
        module = GraphModule(owner, copy.deepcopy(graph))
        text = module.print_readable(print_output=False, include_stride=True)
        self.traces.append(Trace(phase, text, module))


class _Seen(Exception):
    """Raised to stop Inductor once a graph has been recorded."""


def capture(case: Case, stage: str = "aot") -> list[Trace]:
    """Return the graphs of one forward of a case and, when anything requires grad, one backward."""
    recorder = Recorder(stage)
    with (case.context or contextlib.nullcontext)(), torch._functorch.config.patch(enable_autograd_cache=False):
        loss = as_loss(torch.compile(case.module, backend=recorder, dynamic=case.dynamic)(*case.inputs))
        if loss.requires_grad:
            loss.backward()
    return recorder.traces


def as_loss(output: Any) -> torch.Tensor:
    """Return a scalar with a different gradient per output element (a plain sum would hide permuted rows)."""
    leaves = [t for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]
    tensors = [t.to_local() if isinstance(t, DTensor) else t for t in leaves]
    total: Any = 0.0
    for tensor in tensors:
        if tensor.dim() == 0:
            total = total + tensor
        else:
            ramp = torch.linspace(0.5, 1.5, tensor.numel(), device=tensor.device).to(tensor.dtype).view(tensor.shape)
            total = total + (tensor * ramp).sum()
    return total
