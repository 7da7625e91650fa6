"""Coalesced collectives of graphs on ranks: results of a graph, and blocks that Inductor compiles."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.fx import Node

from tests.compiler.dags import Dag, aten, c10d, inputs_of, module_of
from tests.compiler.rank_buckets import Block, buckets
from tests.compiler.rank_compile import world_name
from tests.models.compare import Comparison, compare, uncached
from ub_overlap.compiler.match import bucket_parts
from ub_overlap.compiler.options import Options, parse
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.compiler.rewrite.part_strides import Outputs
from ub_overlap.compiler.rewrite.rewrite_graph import rewrite
from ub_overlap.compiler.select.decide import decide
from ub_overlap.runtime import ops

OPS = torch.ops.ub_overlap
prims = torch.ops.prims
AUTO = Options(profile="h200", few_tokens="off")


def run_graph(rank: int, world: int, collective: str) -> str:
    """Run large and small collectives of two types as one. Return what differs from the plain graph, or ""."""
    ops.load()

    def make() -> Dag:
        d = Dag(world, world_name(), torch.float32)
        x, w = d.input("x", 64, 4096), d.input("w", 4096, 4096)
        shapes = [(16,), (1024, 1024), (512, 4, 512), (8, 3), (1024, 1024), (32,), (4096, 256)]
        tensors = [d.input(f"primals_{i + 1}", *shape) for i, shape in enumerate(shapes)]
        results: list[Node] = []
        for i, tensor in enumerate(tensors):
            narrow = d.call(prims.convert_element_type.default, tensor, torch.bfloat16)
            x = d.mm(x, w) if i == 1 else x
            sent = d.call(prims.convert_element_type.default, narrow, torch.float32) if i % 2 else tensor
            if collective == "all_gather":
                results.append(d.gather(narrow if i % 2 else tensor))
            elif collective == "reduce_scatter":
                results.append(d.scatter(d.call(aten.mul.Tensor, sent, 0.5)))
            else:
                made = d.call(c10d.all_reduce.default, sent, "sum", d.group)
                results.append(d.call(c10d.wait_tensor.default, made))
        for _ in range(8):
            x = d.mm(x, w)
        if collective == "all_gather":
            results = [*(d.call(aten.mul.Tensor, r, 0.5) for r in results), *results]
        d.output(x, *results)
        return d

    d = make()
    phase = "forward" if collective == "all_gather" else "backward"
    decided = decide(d.graph, in_one_bucket(decide(make().graph, AUTO, phase, lambda *_: None).plan), phase, lambda *_: None)
    names = buckets(decided.plan.decisions)
    if len(set(names)) != 1 or "-" in names:
        return f"buckets {names}: {[x.detail for x in decided.plan.decisions]}"
    rewrite(d.graph, decided.chosen, Outputs(is_backward=phase == "backward"), False, decided.layout)
    targets = [n.target for n in d.graph.nodes]
    begin, end = (targets.index(op.default) for op in (OPS.start_coalesced, OPS.finish_coalesced))
    if aten.mm.default not in targets[begin:end] or targets.count(aten.cat.default) != 1:
        return f"products between start and finish, and copies of small tensors, are expected: {targets}"
    inputs = [t if t.shape[0] != 4096 or t.shape[-1] != 4096 else 0.0 * t for t in inputs_of(d.graph, rank)]
    results, truth = module_of(d.graph)(*inputs), module_of(make().graph)(*inputs)
    for i, (a, b) in enumerate(zip(results, truth, strict=True)):
        if a.shape != b.shape or a.stride() != b.stride() or a.dtype != b.dtype or not torch.equal(a, b):
            return f"result {i}: {a.shape} {a.stride()} {a.dtype}, expected {b.shape} {b.stride()} {b.dtype}"
    return ""


def in_one_bucket(plan: Plan) -> Options:
    """Return options with the collectives of `plan` in one bucket."""
    saved = json.loads(plan.to_json())
    for row in saved["sites"]:
        row |= {"strategy": "split", "reason": None, "window": {"bucket": "all"}}
    return replace(AUTO, overrides=parse({"overrides": saved}, frozenset())[0].overrides)


def code_of(rank: int, world: int, cpp_wrapper: bool = False) -> tuple[list[str], list[Plan]]:
    """Return the programs that Inductor generates for forward and backward of blocks, and the plans."""
    torch.manual_seed(3)
    model = nn.Sequential(*(Block(1024, rank, world) for _ in range(4)))
    x = torch.randn(1024, 1024)
    options: dict[str, Any] = {"profile": "h200", "few_tokens": "off", "cpp_wrapper": cpp_wrapper}
    compiled = torch.compile(model, backend="ub_overlap", options=options)
    mark = HISTORY.mark()
    with uncached():
        _, written = run_and_get_code(lambda: compiled(x).square().mean().backward())
    return [text for text in written if "start_coalesced" in text], HISTORY.since(mark)


def run_model(rank: int, world: int, variant: dict[str, Any], options: dict[str, Any]) -> tuple[Comparison, list[str]]:
    """Compare a Llama whose parameters are gathered in the graph, with all of a phase, kind and group in one bucket.

    All but the smallest parameters count as large. Return the outcome, and the bucket of each collective.
    """
    model, split = "tests.models.sharded_llama", {"strategy": "split"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket_parts, "COPIED_BYTES", 512)
        mark = HISTORY.mark()
        compare(rank, world, model, variant, {**options, "overrides": [split]})
        plans = [json.loads(plan.to_json()) for plan in HISTORY.since(mark)]
        for row in (row for plan in plans for row in plan["sites"]):
            row["window"]["bucket"] = f"{row['phase']} {row['kind']} {row['group']}"
        outcome = compare(rank, world, model, variant, {**options, "overrides": plans})
    return outcome, [(d["window"] or {}).get("bucket") or "-" for d in outcome.decisions]
