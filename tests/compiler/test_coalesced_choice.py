"""Coalesced collectives in plans: gathers of weights and norms, and reductions of gradients, as one, and look-alikes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch.fx import Node

from tests.compiler.dags import Dag, aten, c10d
from tests.compiler.rank_buckets import buckets
from tests.compiler.test_buckets import AUTO, plan
from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.cost.profile_lookup import load
from ub_overlap.compiler.cost.site_shape import SiteShape
from ub_overlap.compiler.cost.split_time import coalesced_times, split_times
from ub_overlap.compiler.match.bucket_parts import bucket_parts
from ub_overlap.compiler.match.collectives import read_collective
from ub_overlap.compiler.options import Options, parse
from ub_overlap.compiler.rewrite.part_strides import Outputs
from ub_overlap.compiler.rewrite.rewrite_graph import rewrite
from ub_overlap.compiler.select.decide import decide
from ub_overlap.compiler.windows.buckets import MOST_BYTES
from ub_overlap.runtime.ops import c10d_fallback

OPS = torch.ops.ub_overlap


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are rewritten and not run."""
    monkeypatch.setattr(compat, "group_size", lambda name: 2)
    monkeypatch.setattr(c10d_fallback, "size_of", lambda name: 2)


WIDTH = 4096


def layers(count: int = 3, weights: int = 3, tokens: int = 8192, width: int = WIDTH, names: str = "primals") -> Dag:
    """Return layers of one norm and some weights, all gathered next to where they are used."""
    d = Dag(2)
    x = d.input("x", tokens, width)
    shards = []
    for i in range(8, 8 * (count + 1), 8):
        norm = d.input(f"{names}_{i}", width // 2)
        shards.append((norm, [d.input(f"{names}_{i + k}", width // 2, width) for k in range(1, weights + 1)]))
    for norm, matrices in shards:
        h = d.call(aten.mul.Tensor, x, d.gather(norm))
        for k, matrix in enumerate(matrices):
            product = d.mm(h, d.gather(matrix))
            x = product if k == 0 else d.call(aten.add.Tensor, x, product)
    d.output(x)
    return d


def gradients(count: int = 3, width: int = WIDTH) -> Dag:
    """Return a backward: products, gradients of two weights and of a norm behind each."""
    d = Dag(2)
    x, w = d.input("x", 8192, width), d.input("w", width, width)
    reduced: list[Node] = []
    for _ in range(count):
        y = d.mm(x, w)
        reduced += [d.scatter(d.mm(d.t(x), y)), d.scatter(d.mm(d.t(y), x)), d.scatter(d.call(aten.sum.dim_IntList, y, [0]))]
        x = y
    for _ in range(3):
        x = d.mm(x, w)
    d.output(x, *reduced)
    return d


def targets(d: Dag, phase: str = "forward", options: Options = AUTO) -> list[object]:
    """Return what the rewritten graph calls."""
    decided = decide(d.graph, options, phase, lambda *_: None)
    rewrite(d.graph, decided.chosen, Outputs(is_backward=phase == "backward"), False, decided.layout)
    return [n.target for n in d.graph.nodes]


def test_weights_take_norms_along() -> None:
    """The first layer has nothing to hide behind. What is fused stays so, and all others are joined, also over layers."""
    found = plan(layers(4)).decisions
    names = buckets(found)
    assert names[0] == "-" and all(name != "-" or d.matmuls for d, name in zip(found[3:], names[3:], strict=True))
    by_bucket = {name: [d for d, other in zip(found, names, strict=True) if other == name] for name in names if name != "-"}
    for name, members in by_bucket.items():
        assert len({d.shapes for d in members}) == 2 or name == names[-1]  # weights and norms
        assert sum(d.window.landing_bytes for d in members if d.window) <= MOST_BYTES
        assert len({(d.window.slot, d.window.starts, d.window.finishes) for d in members if d.window}) == 1
        assert all(dict(d.predicted)["split"] < dict(d.predicted)["none"] for d in members)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_one_start_and_finish_for_a_bucket(phase: str) -> None:
    d = layers() if phase == "forward" else gradients()
    found = plan(layers() if phase == "forward" else gradients(), phase=phase).decisions
    coalesced = {name for name in buckets(found) if name != "-"}
    called = targets(d, phase)
    assert called.count(OPS.start_coalesced.default) == called.count(OPS.finish_coalesced.default) == len(coalesced) > 0
    begin, end = called.index(OPS.start_coalesced.default), called.index(OPS.finish_coalesced.default)
    assert {aten.mm.default, OPS.all_gather_matmul.default} & set(called[begin:end])


def test_gradients_are_joined() -> None:
    names = buckets(plan(gradients(), phase="backward").decisions)
    assert names.count("-") <= 1 and len(set(names) - {"-"}) < 5


def test_off() -> None:
    """Look-alike: the option. Norms are sent together as before, weights alone."""
    off = replace(AUTO, coalesce="off", few_tokens="off")
    names = buckets(plan(layers(6), off).decisions)
    assert {name for i, name in enumerate(names) if i % 4} == {"-"} and names[4::4] == ["forward.4"] * 5
    assert OPS.start_coalesced.default not in targets(layers(6), options=off)


def test_groups_are_not_joined() -> None:
    """Look-alike: every second weight has another group."""
    d = layers(4, weights=2)
    gathers = [n for n in d.graph.nodes if n.target is c10d.all_gather_into_tensor.default]
    for node in gathers[1::3]:
        node.args = (*node.args[:2], "other")
    names = buckets(plan(d).decisions)
    first, others = set(names[1::3]) - {"-"}, (set(names[2::3]) | set(names[::3])) - {"-"}
    assert others and not first & others


def test_sums_and_means_are_not_joined() -> None:
    """Look-alike: another reduce_op."""
    d = gradients()
    reductions = [n for n in d.graph.nodes if n.target is c10d.reduce_scatter_tensor.default]
    for node in reductions[::3]:
        node.args = (node.args[0], "avg", *node.args[2:])
    names = buckets(plan(d, phase="backward").decisions)
    means, sums = set(names[::3]) - {"-"}, (set(names[1::3]) | set(names[2::3])) - {"-"}
    assert sums and not means & sums


@pytest.mark.parametrize(
    ("d", "options"),
    [
        (layers(names="saved"), AUTO),
        (layers(tokens=16), AUTO),
        (layers(), replace(AUTO, split_bytes=32 << 20)),
        (layers(), replace(AUTO, overlap="force")),
    ],
    ids=["activations", "narrow windows", "memory", "force"],
)
def test_look_alikes(d: Dag, options: Options) -> None:
    """Weights are not joined: those of a norm may be."""
    assert {name for i, name in enumerate(buckets(plan(d, options).decisions)) if i % 4} == {"-"}


def test_zero_copy_buckets() -> None:
    """Weights whose readers are known stay in landing memory together; norms, which Inductor would store, are copied apart."""
    found = plan(layers(), replace(AUTO, zero_copy="auto")).decisions
    names = buckets(found)
    in_place = {names[i] for i, d in enumerate(found) if d.window and d.window.releases is not None}
    copied = {names[i] for i, d in enumerate(found) if d.window and d.window.releases is None}
    assert in_place - {"-"} and in_place.isdisjoint(copied - {"-"})
    norms = {i for i in range(len(found)) if i % 4 == 0}
    assert all(d.window is None or d.window.releases is None for i, d in enumerate(found) if i in norms)
    joined = [i for i in range(len(found)) if names[i] in in_place - {"-"}]
    assert len(joined) > 1 and norms.isdisjoint(joined)


def test_a_zero_copy_bucket_in_a_graph() -> None:
    """One start, one finish, and one release of all results, behind the last reader of each."""
    d = layers()
    decided = decide(d.graph, replace(AUTO, zero_copy="auto"), "forward", lambda *_: None)
    rewrite(d.graph, decided.chosen, Outputs(), False, decided.layout)
    order = list(d.graph.nodes)
    releases = [n for n in order if n.target is OPS.release_coalesced.default]
    assert releases
    for release in releases:
        (finish,) = {n.all_input_nodes[0] for n in release.all_input_nodes}
        assert finish.target is OPS.finish_coalesced.default and finish.args[6] is True
        (start,) = {n for n in finish.all_input_nodes if n.target is OPS.start_coalesced.default}
        assert start.args[5] is True and len(release.all_input_nodes) == len(start.args[0]) > 1  # type: ignore[arg-type]
        last = max(order.index(user) for n in release.all_input_nodes for user in n.users if user is not release)
        assert last < order.index(release) and (release.args[1], *release.args[2:]) == (start.args[4], *start.args[6:])
        assert any("matmul" in str(n.target) for n in order[order.index(start) : order.index(finish)])


def test_a_required_split_stays_alone() -> None:
    """Look-alike: the user requests a split collective of its own."""
    options, _ = parse({"profile": "h200", "overrides": {"forward.6": "split"}}, frozenset())
    names = buckets(plan(layers(), options).decisions)
    assert names[6] == "-" and len(set(names)) > 1


@pytest.mark.parametrize("overlap", ["auto", "force", "off"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_saved_plan_has_its_coalesced_collectives(overlap: str, phase: str) -> None:
    """Whatever would be chosen without it."""
    made = layers if phase == "forward" else gradients
    found = plan(made(), phase=phase)
    overrides = parse({"overrides": json.loads(found.to_json())}, frozenset())[0].overrides
    saved = Options(profile="h200", overlap=overlap, coalesce="off", overrides=overrides)  # type: ignore[arg-type]
    again = plan(made(), saved, phase)
    assert buckets(again.decisions) == buckets(found.decisions) != ["-"] * len(found.decisions)
    assert targets(made(), phase, saved).count(OPS.start_coalesced.default) == len(set(buckets(found.decisions)) - {"-"})


def test_parts() -> None:
    """Weights are parts of their own, small tensors of a type are one part."""
    d = layers(2, weights=2)
    shard = d.graph.find_nodes(op="placeholder")[1]
    wide = d.gather(d.call(torch.ops.prims.convert_element_type.default, shard, torch.float32))
    waits = [n for n in d.graph.nodes if n.target is c10d.wait_tensor.default]
    collectives = [read_collective(n.args[0]) for n in waits]  # type: ignore[arg-type]
    assert waits[-1] is wide
    assert bucket_parts(collectives) == [[0, 3], [1], [2], [4], [5], [6]]


@pytest.mark.parametrize("kind", ["bulk_all_gather", "bulk_reduce_scatter", "bulk_all_reduce"])
@pytest.mark.parametrize("profile", ["h100", "h200"])
def test_price(kind: str, profile: str) -> None:
    """A coalesced collective has the fixed steps of one, and all transfers, copies and sums."""
    known = load(profile, 2, "cuda")
    shapes = tuple(SiteShape(kind, 2, "bfloat16", (), rows << 20, 1) for rows in (16, 4, 4))
    alone = [split_times(shape, 0, known) for shape in shapes]
    joined = coalesced_times(shapes, 0, known)
    fixed = known.steps.begin_us + known.steps.wait_us + known.steps.end_us
    saved = sum(t.shortest_us for t in alone) - joined.shortest_us
    assert saved >= 2 * fixed - 1e-6 and saved <= 4 * fixed + 8 * known.steps.flag_us
    assert joined.plain_us == pytest.approx(sum(t.plain_us for t in alone))
    assert max(t.transfer_us for t in alone) < joined.transfer_us <= sum(t.transfer_us for t in alone)
    assert coalesced_times(shapes[:1], 0, known) == alone[0]
