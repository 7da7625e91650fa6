"""What ranks run of tests/compiler/test_apply_passes.py: whole steps as one graph, as traced and rewritten."""

from __future__ import annotations

import copy
import functools
import importlib
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import annotate
from torch.nn.functional import cross_entropy

import ub_overlap
from tests.compiler.rank_compile import world_name
from tests.models.absent import stand_ins
from tests.models.compare import error, uncached
from tests.models.torchtitan_llama import UNUSED
from tests.models.whole_step import trace
from ub_overlap._torch_compat import compile_fx
from ub_overlap.compiler.reports.history import HISTORY

Rows = list[dict[str, Any]]


def run(gm: Any, inputs: list[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [t.clone() for t in gm(*inputs)]


def worst(results: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest relative difference of a result."""
    return max(error(a, b, str(i)) for i, (a, b) in enumerate(zip(results, expected, strict=True)))


def apply(gm: Any, inputs: list[Tensor], **settings: Any) -> Rows:
    """Apply the passes, and return the decisions."""
    mark = HISTORY.mark()
    assert ub_overlap.apply_passes(gm, inputs, **settings) is gm
    return [d.to_dict() for plan in HISTORY.since(mark) for d in plan.decisions]


def whole_step(
    rank: int, world: int, module: str, variant: dict[str, Any], parameters: int | None, *choices: dict[str, Any]
) -> list[tuple[float, Rows]]:
    """Return the worst error against the graph as traced, and the decisions, with each of the options `choices`.

    The first of two graphs has its values, the second lost them.
    """
    gm, inputs = trace(importlib.import_module(module).build(rank, world, **variant))
    expected, outcomes = run(gm, inputs), []
    for options in choices:
        rewritten = copy.deepcopy(gm)
        if options is not choices[0]:
            for node in rewritten.graph.nodes:
                node.meta.pop("val", None)
        known = None if parameters is None else range(parameters)
        rows = apply(rewritten, inputs, options=options, parameters=known)
        outcomes.append((worst(run(rewritten, inputs), expected), rows))
    return outcomes


def reported(rank: int, world: int) -> dict[str, Any]:
    """Return what explain, a saved plan and the compilers make of one rewritten step."""
    gm, inputs = trace(importlib.import_module("tests.models.zero3").build(rank, world, layers=1))
    expected, again = run(gm, inputs), copy.deepcopy(gm)
    options = {"overlap": "off", "overrides": {"step.[02]": "split"}, "verify": True}
    apply(gm, inputs, options=options, parameters=range(2))
    report = ub_overlap.explain(gm)(*inputs)
    plan, calls = report.plans[0], [d.calls for d in report.decisions if d.overlapped]
    saved = apply(again, inputs, options={"overlap": "off", "overrides": plan}, parameters=range(2))
    mark = HISTORY.mark()
    with uncached(), torch.no_grad():
        lowered = compile_fx(copy.deepcopy(again), inputs, config_patches=ub_overlap.passes())(*inputs)
        compiled = torch.compile(again, backend="ub_overlap")(*inputs)
    return {
        "phase": plan.phase,
        "calls": calls,
        "strategies": [str(d.strategy) for d in plan.decisions],
        "saved": [row["strategy"] for row in saved],
        "errors": [worst(list(got), expected) for got in (run(gm, inputs), lowered, compiled)],
        "plans of compilers": len(HISTORY.since(mark)),
    }


def graph_trainer(rank: int, world: int, tp: int = 2, reshard: str = "") -> tuple[float, Rows]:
    """Return the error and the decisions of a step that torchtitan traces (aot_fx_trace), behind two of its own passes.

    `reshard`: "always" or "never". Then its memory policy, which repeats forward's nodes in backward, is in front of ours.
    """
    case = importlib.import_module("tests.models.sharded_llama").build(rank, world, source="torchtitan", tp=tp)
    with stand_ins(*UNUSED):
        from torchtitan.experiments.graph_trainer import memory_policy
        from torchtitan.experiments.graph_trainer.make_fx_tracer import minimal_fx_tracer, run_traced
        from torchtitan.experiments.graph_trainer.remove_noop_passes import canonicalize_graph_pass, eliminate_dead_code_pass
        from torchtitan.experiments.graph_trainer.selective_activation_remat import selective_activation_remat_pass

    (tokens,) = case.inputs

    def step(tokens: Tensor, labels: Tensor) -> list[Tensor]:
        with annotate({"module_fqn": "model"}):
            logits = case.module(tokens)
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
        return [loss, *torch.autograd.grad(loss, list(case.module.parameters()))]

    traced = minimal_fx_tracer(step, module=case.module)(tokens, tokens.roll(1, 1))

    def outputs() -> list[Tensor]:
        values = run_traced(traced, module=case.module)(tokens, tokens.roll(1, 1))
        return [v.to_local() if isinstance(v, DTensor) else v for v in values]

    expected, mark = outputs(), HISTORY.mark()
    options = {"overlap": "off", "overrides": [{"phase": "backward", "module": "model", "strategy": "split"}]}
    own = functools.partial(ub_overlap.apply_passes, parameters=range(traced.num_static_inputs), options=options)
    config = SimpleNamespace(
        compile=SimpleNamespace(memory_policy="default"),
        parallelism=SimpleNamespace(fsdp_reshard_after_forward=reshard, pipeline_parallel_degree=1),
    )
    tag = functools.partial(memory_policy.tag_with_memory_policy_pass, config=config)
    kept = {*memory_policy._get_default_save_ops(), torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default}
    with patch.object(memory_policy, "_get_default_save_ops", lambda: kept):  # torchtitan knows the kernels of GPUs
        for one in (
            eliminate_dead_code_pass,
            canonicalize_graph_pass,
            *((tag, selective_activation_remat_pass) if reshard else ()),
            own,
        ):
            traced.gm = one(traced.gm, traced.example_inputs)
    return worst(outputs(), expected), [d.to_dict() for plan in HISTORY.since(mark) for d in plan.decisions]


def gathered_columns_alternate(x: Tensor, w: Tensor) -> Tensor:
    """The columns of the ranks alternate in what the matmul reads: [R, m, K] -> [m, K, R] -> [m, K * R]."""
    g = funcol.all_gather_tensor(x, 0, world_name())
    return g.view(-1, *x.shape).permute(1, 2, 0).reshape(x.shape[0], -1) @ w.repeat(g.shape[0] // x.shape[0], 1)


def gathered_and_written(x: Tensor, w: Tensor) -> Tensor:
    g = funcol.all_gather_tensor(x, 0, world_name()).clone()
    return g.mul_(2).add_(1.0) @ w


def written_product(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    y.relu_()
    return funcol.reduce_scatter_tensor(y, "sum", 0, world_name())


def alike(rank: int, world: int) -> dict[str, tuple[float, Rows]]:
    """Return the error and the decisions of graphs that resemble a site."""
    outcomes = {}
    for function in (gathered_columns_alternate, gathered_and_written, written_product):
        torch.manual_seed(rank)
        inputs = [torch.randn(6, 8), torch.randn(8, 10)]
        gm = make_fx(function)(*inputs)
        expected = [gm(*inputs)]
        rows = apply(gm, inputs, options={"overlap": "force", "split": "off"})
        outcomes[function.__name__] = worst([gm(*inputs)], expected), rows
    return outcomes
