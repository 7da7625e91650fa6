"""Repeats that are sent once, and sums that are sent in place of their terms. What looks alike stays."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from tests.compiler.dags import Dag, aten, c10d, inputs_of, module_of
from tests.compiler.one_rank import OneRank
from tests.compiler.repeat_forms import (
    ALL,
    CAST,
    GRADIENTS_LEFT,
    LEFT,
    POSITIONS,
    RANKS,
    REPEATS,
    ROWS,
    SENT_ONCE,
    SUMMED,
    WIDTH,
    Form,
    backward,
    build,
    filled_later,
    flat,
    gathered_repeats,
    gradients,
    keys,
    of_gradients,
    own,
    repeat,
    rotate,
    sum_heads,
    through,
    tiled,
)
from ub_overlap.compiler.joint.joint_decision import joint_decision
from ub_overlap.compiler.joint.repeats.send_once import may_send_once, send_once


def run(graph: Graph) -> list[torch.Tensor]:
    return OneRank(module_of(graph)).run(*inputs_of(graph, 0))  # type: ignore[no-any-return]


def collectives(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if "c10d" in str(n.target) and n.target is not c10d.wait_tensor.default]


def strides(t: torch.Tensor) -> list[int]:
    """Return the strides of the dims that matter."""
    return [stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1]


def sent(graph: Graph) -> int:
    """Return the elements that collectives read."""
    ops = (c10d.all_to_all_single.default, c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default)
    return sum(n.args[0].meta["val"].numel() for op in ops for n in graph.find_nodes(op="call_function", target=op))  # type: ignore[union-attr]


@pytest.mark.parametrize("name", SENT_ONCE)
def test_what_is_repeated_is_sent_once(name: str) -> None:
    form, count = SENT_ONCE[name]
    graph = build(form)
    expected, before, number = run(graph), sent(graph), len(collectives(graph))
    assert may_send_once(graph) and send_once(graph) == count
    graph.lint()
    assert sent(graph) * REPEATS == before
    for found, wanted in zip(run(graph), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        assert strides(found) == strides(wanted)
    for node in graph.nodes:
        assert node.op == "output" or {"val", "partitioner_tag"} <= node.meta.keys(), node
    assert len(collectives(graph)) == number
    for node in collectives(graph):
        assert node.users and all(u.target is c10d.wait_tensor.default and u.users for u in node.users), "not waited for"
    assert send_once(graph) == 0, "nothing is left to do"


def test_what_is_reported() -> None:
    graph = build(gradients)
    send_once(graph)
    # The gather of forward sends 3/2 of a step of the ring: to 3 ranks, and keys only.
    assert send_once(build(gradients), 2 * ROWS * 8 // REPEATS + 1) == 1, "steps of the ring are worth less"
    assert send_once(build(gradients), 3 * ROWS * 8 // REPEATS + 1) == 0
    for node in graph.find_nodes(op="call_function", target=c10d.all_to_all_single.default):
        decision = joint_decision(node)
        assert decision.saved_bytes == 2 * ROWS * 8 * (REPEATS - 1) // REPEATS
        assert f"{2 * ROWS * 8 // REPEATS} bytes instead of {2 * ROWS * 8}" in decision.change_note


def test_narrow_gradients_are_summed_in_fp32() -> None:
    """Gradients in bf16 that are added in fp32 are summed over their heads in fp32 too."""

    def accumulated(d: Dag, k: Node, v: Node) -> list[Node]:
        read = backward(d, k)
        dk, dv = (d.call(aten.exp.default, repeat(d, t)) for t in (k, v))
        zeros = d.call(CAST, d.call(aten.full.default, [1, ALL, POSITIONS, WIDTH], 1), torch.float32)
        received = keys(d, rotate(d, flat(d, *(d.call(aten.add.Tensor, zeros, t) for t in (dk, dv)))))
        return [*(sum_heads(d, t) for t in received), read]

    graph = build(accumulated, torch.bfloat16)
    expected = run(graph)
    assert send_once(graph) == 2
    for found, wanted in zip(run(graph), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    sums = graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    assert sums and all(n.meta["val"].dtype is torch.float32 for n in sums)


def test_a_sum_is_rounded_once() -> None:
    """torch's ring sends gradients in fp32, and rounds them behind the last step: now their sum is rounded."""

    def cast_to(dtype: torch.dtype) -> Form:
        def form(d: Dag, k: Node, v: Node) -> list[Node]:
            read = backward(d, k)
            wide = [d.call(CAST, d.call(aten.exp.default, repeat(d, t)), torch.float32) for t in (k, v)]
            return [*(sum_heads(d, t) for t in keys(d, d.call(CAST, rotate(d, flat(d, *wide)), dtype))), read]

        return form

    exact = run(build(cast_to(torch.float32), torch.bfloat16))
    graph = build(cast_to(torch.bfloat16), torch.bfloat16)
    traced = run(graph)
    assert send_once(graph) == 2
    error, before = (sum(float((a - b).abs().sum()) for a, b in zip(r, exact, strict=True)) for r in (run(graph), traced))
    assert 0 < error <= before


# --- what looks alike ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GRADIENTS_LEFT)
def test_gradients_that_stay(name: str) -> None:
    """Forward's gather sends less. Backward's collective stays."""
    graph = build(of_gradients(GRADIENTS_LEFT[name]), torch.float32)
    expected, before = run(graph), [n.args[0].meta["val"].numel() for n in collectives(graph)]
    assert send_once(graph) == 1
    graph.lint()
    assert [n.args[0].meta["val"].numel() for n in collectives(graph)] == [before[0] // REPEATS, *before[1:]]
    assert all(map(torch.equal, run(graph), expected))


def test_sums_in_front_only_where_repeats_were_sent() -> None:
    """In forward, in another group, and where forward sent no repeats, a sum behind a collective stays."""
    assert send_once(build(SUMMED)) == 2
    assert send_once(build(of_gradients(lambda d, dk: [sum_heads(d, own(d, d.gather(dk)))], group="h"))) == 1
    assert send_once(build(of_gradients(lambda d, dk: [sum_heads(d, own(d, d.gather(dk)))], repeats=False))) == 0
    graph = build(SUMMED)
    for node in graph.nodes:
        node.meta["partitioner_tag"] = "is_forward"
    assert send_once(graph) == 1


@pytest.mark.parametrize("name", LEFT)
def test_what_stays(name: str) -> None:
    graph = build(LEFT[name])
    before = str(graph)
    assert send_once(graph) == 0 and str(graph) == before


def test_tiled_heads() -> None:
    """Heads that are repeated as a whole are sent once too."""
    graph = build(tiled)
    expected, before = run(graph), sent(graph)
    assert send_once(graph) == 1 and sent(graph) * REPEATS == before
    assert all(map(torch.equal, run(graph), expected))


def test_what_is_repeated_behind_a_saved_wait_is_not_saved() -> None:
    """A policy of the user saves results of collectives. What they are repeated to is made again."""
    graph = build(lambda d, k, v: through(d, gathered_repeats(d, k), aten.exp.default))
    for node in graph.find_nodes(op="call_function", target=c10d.wait_tensor.default):
        node.meta |= {"recompute": CheckpointPolicy.MUST_SAVE, "ac_graph_id": 1}
    assert send_once(graph) == 1
    (saved,) = [n for n in graph.nodes if n.meta.get("recompute") is CheckpointPolicy.MUST_SAVE]
    assert saved.target is c10d.wait_tensor.default and saved.meta["val"].numel() * REPEATS == RANKS * ROWS
    for node in graph.nodes:
        node.meta.pop("recompute", None)


def test_sums_in_the_type_of_their_readers() -> None:
    """Where two types are asked for, sums are made of what reads the gradient, each in its own type."""

    def form(d: Dag, dk: Node) -> list[Node]:
        narrow = d.call(CAST, dk, torch.bfloat16)
        wide = d.gather(d.call(aten.add.Tensor, narrow, d.call(CAST, dk, torch.float32)))
        other = d.gather(d.call(aten.clone.default, narrow))
        return [sum_heads(d, d.call(aten.slice.Tensor, whole, 0, 0, 1)) for whole in (wide, other)]

    graph = build(of_gradients(form), torch.float32)
    expected = run(graph)
    assert send_once(graph) == 3
    for found, wanted in zip(run(graph), expected, strict=True):
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted, rtol=1e-6 if found.dtype is torch.float32 else 1e-2, atol=0)


def test_memory_that_is_written_later() -> None:
    """A copy behind the write is summed, not the view in front of it."""
    graph = build(of_gradients(filled_later))
    expected = run(graph)
    assert send_once(graph) == 2
    for found, wanted in zip(run(graph), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
