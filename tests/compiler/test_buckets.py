"""Buckets: small gathers of parameters and reductions of gradients as one split collective, and look-alikes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import Node

from tests.compiler.dags import Dag, aten, c10d, inputs_of, module_of
from tests.compiler.rank_buckets import buckets, run_blocks
from tests.compiler.rank_compile import world_name
from tests.harness.ranks import RankPool
from tests.harness.tiers import in_full
from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.cost.profile_lookup import FOLDER
from ub_overlap.compiler.options import Options, parse
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.plan.reasons import Reason
from ub_overlap.compiler.rewrite.part_strides import Outputs
from ub_overlap.compiler.rewrite.rewrite_graph import rewrite
from ub_overlap.compiler.select.decide import decide
from ub_overlap.compiler.windows.buckets import MOST_BYTES
from ub_overlap.runtime import ops

AUTO = Options(profile="h200")
COLLECTIVES = torch.ops.ub_overlap
prims = torch.ops.prims


def norms(count: int = 6, rows: int = 2048, dtypes: tuple[torch.dtype, ...] = ()) -> Dag:
    """Return `count` products with whole weights, each behind a norm whose weight is gathered.

    `rows`: of a norm's shard. `dtypes`: to which the shards are cast before.
    """
    d = Dag(2)
    x = d.input("x", 8192, 2 * rows)
    shards = [d.input(f"primals_{i + 1}", rows) for i in range(count)]
    weights = [d.input(f"w{i}", 2 * rows, 2 * rows) for i in range(count)]
    for i, (shard, w) in enumerate(zip(shards, weights, strict=True)):
        sent = d.call(prims.convert_element_type.default, shard, dtypes[i]) if dtypes else shard
        gathered = d.gather(sent)
        if dtypes:
            gathered = d.call(prims.convert_element_type.default, gathered, torch.bfloat16)
        x = d.mm(d.call(aten.mul.Tensor, x, gathered), w)
    d.output(x)
    return d


def gradients(count: int = 6, columns: int = 4096) -> Dag:
    """Return a backward in which each of `count` products is followed by the gradient of a norm's weight."""
    d = Dag(2)
    x, w = d.input("x", 8192, columns), d.input("w", columns, columns)
    reduced = []
    for _ in range(count):
        reduced.append(d.scatter(d.call(aten.sum.dim_IntList, x, [0])))
        x = d.mm(x, w)
    d.output(x, *reduced)
    return d


def plan(d: Dag, options: Options = AUTO, phase: str = "forward") -> Plan:
    return decide(d.graph, options, phase, lambda *_: None).plan


def test_gathers_of_norms_are_one_collective() -> None:
    """All but the first, which nothing hides. They share a slot, an order and a start; each has its share of the times."""
    found = plan(norms())
    assert buckets(found.decisions) == ["-", *["forward.1"] * 5]
    assert found.decisions[0].reason is Reason.NON_LINEAR
    windows = [d.window for d in found.decisions[1:] if d.window is not None]
    assert len({(w.slot, w.order, w.starts, w.finishes) for w in windows}) == 1
    assert all("in the bucket of forward.1" in d.detail for d in found.decisions[1:])
    predicted = [dict(d.predicted) for d in found.decisions[1:]]
    assert all(p["split"] < p["none"] for p in predicted)
    again = Plan.from_json(found.to_json())
    assert again.digest == found.digest and again.decisions == found.decisions


def few_tokens(folder: Path, kernel_us: float, plain_us: float = 11.0) -> Options:
    """Return options with a profile in which a small gather or reduction takes `kernel_us` as one kernel, else `plain_us`."""
    document = json.loads((FOLDER / "h200.json").read_text())
    curves = {form: [[4096, us], [1 << 20, us]] for form, us in (("none", plain_us), ("one_shot", kernel_us))}
    document["fused"] |= {kind: {"2": curves} for kind in ("all_gather", "reduce_scatter")}
    path = folder / f"few_tokens_{kernel_us}.json"
    path.write_text(json.dumps(document))
    return Options(profile=str(path))


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_bucket_and_one_kernel_for_each(phase: str, tmp_path: Path) -> None:
    """A bucket is taken where it saves more than a kernel for each of its collectives; what is in none has a kernel."""
    d = norms(9) if phase == "forward" else gradients(9)
    alone = ["-"] if phase == "forward" else []
    bucket = f"{phase}.{len(alone)}"
    found = plan(d, few_tokens(tmp_path, 6.0), phase).decisions
    assert buckets(found) == [*alone, *[bucket] * (9 - len(alone))]
    assert [str(one.strategy) for one in found[: len(alone)]] == ["one_shot"] * len(alone)
    found = plan(d, few_tokens(tmp_path, 0.1), phase).decisions
    assert buckets(found) == ["-"] * 9
    assert {str(one.strategy) for one in found} == {"one_shot"}
    found = plan(d, replace(few_tokens(tmp_path, 6.0), few_tokens="off"), phase).decisions
    assert buckets(found) == [*alone, *[bucket] * (9 - len(alone))]


def test_what_does_not_fit_into_a_bucket_has_a_kernel(tmp_path: Path) -> None:
    """Look-alike: memory for no bucket. Each collective gets its kernel back."""
    found = plan(norms(9), replace(few_tokens(tmp_path, 6.0), split_bytes=0)).decisions
    assert buckets(found) == ["-"] * 9 and {str(one.strategy) for one in found} == {"one_shot"}


def test_ranks_compare_buckets() -> None:
    found = plan(norms())
    alone = replace(found.decisions[3], window=replace(found.decisions[3].window, bucket=None))  # type: ignore[type-var]
    assert replace(found, decisions=(*found.decisions[:3], alone)).shared_digest != found.shared_digest


def test_gradients_are_one_reduction() -> None:
    """It starts where the last gradient is ready that leaves a window, and finishes at the end."""
    assert buckets(plan(gradients(), phase="backward").decisions) == ["backward.0"] * 6


def test_a_gradient_without_a_window_stays_alone() -> None:
    """Look-alike: it is ready at the end, where nothing hides a collective. It does not delay the others."""
    d = gradients()
    (output,) = (n for n in d.graph.nodes if n.op == "output")
    results: list[Node] = list(output.args[0])  # type: ignore[arg-type]
    d.graph.erase_node(output)
    d.output(*results, d.scatter(d.call(aten.sum.dim_IntList, results[0], [0])))
    assert buckets(plan(d, phase="backward").decisions) == [*["backward.0"] * 6, "-"]


@pytest.mark.parametrize(
    "options",
    [
        Options(profile="h200", min_bytes=0, coalesce="off"),
        Options(profile="h200", split="off"),
        Options(profile="h200", overlap="force"),
        Options(profile="h200", split_bytes=0),
        Options(),
    ],
    ids=["min_bytes", "split", "force", "split_bytes", "cpu"],
)
def test_options_without_buckets(options: Options) -> None:
    """Above the threshold collectives are weighed one by one; on the CPU without a profile nothing is weighed."""
    assert buckets(plan(norms(), options).decisions) == ["-"] * 6


def test_types_have_buckets_of_their_own() -> None:
    """Without coalesced collectives. With them each type is a part."""
    wide, narrow = torch.float32, torch.bfloat16
    d = norms(11, dtypes=(wide, *[wide, narrow] * 5))
    assert buckets(plan(d, replace(AUTO, coalesce="off")).decisions) == ["-", *["forward.1", "forward.2"] * 5]
    assert buckets(plan(d).decisions) == ["-", *["forward.1"] * 10]


def test_groups_have_buckets_of_their_own() -> None:
    d = norms(11)
    gathers = [n for n in d.graph.nodes if n.target is c10d.all_gather_into_tensor.default]
    for node in gathers[1::2]:
        node.args = (*node.args[:2], "other")
    assert buckets(plan(d).decisions) == ["-", *["forward.1", "forward.2"] * 5]


def test_a_write_to_a_shard_keeps_it_out() -> None:
    """A shard that is written later than the others' bucket starts is gathered behind the write."""
    d = Dag(2)
    x = d.input("x", 8192, 4096)
    shards = [d.input(f"primals_{i + 1}", 2048) for i in range(7)]
    w = d.input("w", 4096, 4096)
    for i, shard in enumerate(shards):
        if i == 3:
            d.call(aten.mul_.Tensor, shard, 0.5)
        x = d.mm(d.call(aten.mul.Tensor, x, d.gather(shard)), w)
    d.output(x)
    assert buckets(plan(d).decisions) == ["-", "forward.1", "forward.1", "-", *["forward.1"] * 3]


def test_activations_stay_alone() -> None:
    """Look-alike: what is gathered is no parameter."""
    d = Dag(2)
    x, w = d.input("x", 8192, 4096), d.input("w", 4096, 4096)
    shards = [d.input(f"saved_{i}", 2048) for i in range(6)]
    for shard in shards:
        x = d.mm(d.call(aten.mul.Tensor, x, d.gather(shard)), w)
    d.output(x)
    assert buckets(plan(d).decisions) == ["-"] * 6


def test_a_bucket_ends_where_its_bytes_are_enough() -> None:
    """Landing memory is limited, and the collectives behind the limit are in the next one."""
    count = 24
    found = plan(norms(count, rows=256 << 10)).decisions
    names = [name for name in buckets(found) if name != "-"]
    assert len(names) >= count - 2 and len(set(names)) > 1
    for name in set(names):
        windows = [d.window for d in found if d.window is not None and d.window.bucket == name]
        assert sum(w.landing_bytes for w in windows) <= MOST_BYTES


# --- on ranks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_reduce"])
def test_results_on_ranks(pool2: RankPool, collective: str) -> None:
    """Several shapes in one bucket, with casts in front and behind, give what the plain graph gives."""
    assert pool2.run(run_graph, collective) == [""] * 2


def run_graph(rank: int, world: int, collective: str) -> str:
    """Return what differs, or ""."""
    ops.load()

    def make() -> Dag:
        d = Dag(world, world_name(), torch.float32)
        x, w = d.input("x", 64, 4096), d.input("w", 4096, 4096)
        shapes = [(4096,), (64, 2), (2, 3, 8), (8,), (2,), (4, 1), *[(2 * i,) for i in range(1, 13)]]
        shapes += [(1, 8), (1,), (1, 4096)] if collective == "all_gather" else []  # the columns have the shape of the result
        tensors = [d.input(f"primals_{i + 1}", *shape) for i, shape in enumerate(shapes)]
        results = []
        for tensor in tensors:
            narrow = d.call(prims.convert_element_type.default, tensor, torch.bfloat16)
            x = d.mm(x, w) if len(results) == 1 else x
            if collective == "all_gather":
                results.append(d.gather(narrow))
                continue
            wide = d.call(aten.mul.Tensor, d.call(prims.convert_element_type.default, narrow, torch.float32), 0.5)
            if collective == "reduce_scatter":
                results.append(d.scatter(wide))
            else:
                made = d.call(c10d.all_reduce.default, wide, "sum", d.group)
                results.append(d.call(c10d.wait_tensor.default, made))
        for _ in range(4):
            x = d.mm(x, w)
        if collective == "all_gather":
            late = [d.call(aten.view.default, r, [-1]) for r in results]
            whole = [d.call(aten.as_strided.default, r, [2], [1], 0) for r in results[-3:]]
            results = [
                *(d.call(aten.add.Tensor, r, 1.0) for r in late),
                *(d.call(aten.mul.Tensor, w, 2.0) for w in whole),
                *results,
            ]
        d.output(x, *results)
        return d

    d = make()
    phase = "forward" if collective == "all_gather" else "backward"
    decided = decide(d.graph, replace(AUTO, few_tokens="off"), phase, lambda *_: None)
    names = set(buckets(decided.plan.decisions))
    if "-" in names:
        return f"buckets {buckets(decided.plan.decisions)}: {[x.detail for x in decided.plan.decisions]}"
    rewrite(d.graph, decided.chosen, Outputs(is_backward=phase == "backward"), False, decided.layout)
    targets = [n.target for n in d.graph.nodes]
    ends = [targets.index(op.default) for op in (COLLECTIVES.start_collective, COLLECTIVES.finish_collective)]
    if [targets.count(targets[end]) for end in ends] != [len(names)] * 2 or aten.mm.default not in targets[slice(*ends)]:
        return f"one start and one finish for each of {names} with a product in between are expected: {targets}"
    inputs = [t.clamp(-1, 1) * (0.0 if t.shape[0] == 4096 and t.dim() == 2 else 1.0) for t in inputs_of(d.graph, rank)]
    results, truth = module_of(d.graph)(*inputs), module_of(make().graph)(*inputs)
    for i, (a, b) in enumerate(zip(results, truth, strict=True)):
        if a.shape != b.shape or a.stride() != b.stride() or a.dtype != b.dtype or not torch.equal(a, b):
            return f"result {i}: {a.shape} {a.stride()} {a.dtype}, expected {b.shape} {b.stride()} {b.dtype}"
    return ""


@pytest.mark.parametrize(
    "options",
    [
        {"inner": "aot_eager"},
        in_full({"memory_budget": 0}),
        in_full({"inner": "aot_eager", "verify": True, "memory_budget": 0}),
    ],
    ids=["aot_eager", "inductor", "verify"],
)
def test_sharded_blocks(pool2: RankPool, options: dict[str, Any]) -> None:
    """Norms, biases and small weights of a compiled model: two steps with the gradients of eager code."""
    assert pool2.run(run_blocks, options) == [""] * 2


def test_small_all_reduces() -> None:
    """All_reduces of gradients, each of which could be one kernel of few tokens: a bucket saves more."""
    d = Dag(2)
    x, w = d.input("x", 8192, 4096), d.input("w", 4096, 4096)
    reduced = []
    for _ in range(8):
        made = d.call(c10d.all_reduce.default, d.call(aten.sum.dim_IntList, x, [0]), "sum", d.group)
        reduced.append(d.call(c10d.wait_tensor.default, made))
        x = d.mm(x, w)
    d.output(x, *reduced)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "group_size", lambda name: 2)  # the graph is not run
        found = plan(d, phase="backward").decisions
        alone = plan(d, replace(AUTO, few_tokens="off"), phase="backward").decisions
    assert buckets(found) == buckets(alone) == ["backward.0"] * 8


def test_results_of_the_user_are_not_views(pool2: RankPool) -> None:
    """Look-alike: statistics that a forward returns. autograd forbids to write to one of several views of one tensor."""
    assert pool2.run(return_statistics) == [""] * 2


def return_statistics(rank: int, world: int) -> str:
    """Return which results of a forward share memory, or ""."""
    ops.load()
    d = gradients(6)
    for node in d.graph.nodes:
        if node.target is c10d.reduce_scatter_tensor.default:
            node.args = (*node.args[:3], world_name())
    decided = decide(d.graph, AUTO, "forward", lambda *_: None)
    if buckets(decided.plan.decisions) != ["forward.0"] * 6:
        return f"buckets {buckets(decided.plan.decisions)}"
    rewrite(d.graph, decided.chosen, Outputs(), False, decided.layout)
    results = d.graph.output_node().args[0]
    shared = [n for n in results[1:] if n.target is not aten.clone.default and "clone" not in str(n.all_input_nodes)]  # type: ignore[union-attr, index]
    return f"views: {shared}" if shared else ""


@pytest.mark.parametrize("overlap", ["auto", "force", "off"])
def test_a_saved_plan_has_its_buckets(overlap: Any) -> None:
    """Whatever would be chosen without it."""
    found = plan(norms(16))
    overrides = parse({"overrides": json.loads(found.to_json())}, frozenset())[0].overrides
    saved = Options(profile="h200", overlap=overlap, overrides=overrides)
    assert buckets(plan(norms(16), saved).decisions) == buckets(found.decisions) != ["-"] * 16


def test_a_dynamic_size_stays_alone() -> None:
    """Look-alike: the number of a parameter's rows is a symbol with a hint."""
    env = compat.__getattr__("ShapeEnv")()
    d = Dag(2)
    d.mode = compat.FakeTensorMode(shape_env=env)
    x, w = d.input("x", 8192, 4096), d.input("w", 4096, 4096)
    shards = []
    for i in range(8):
        shards.append(d.graph.placeholder(f"primals_{i + 1}"))
        shards[-1].meta["val"] = d.mode.from_tensor(torch.empty(2048 + i, dtype=d.dtype), static_shapes=False)
    gathered = []
    for shard in shards:
        gathered.append(d.gather(shard))
        x = d.mm(x, w)
    d.output(x, *gathered)
    assert buckets(plan(d).decisions) == ["-"] * 8
