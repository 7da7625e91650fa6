"""Which ops count as communication: each has a Decision or a Reason, also those of other libraries."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory  # registers its ops
import torch.distributed.distributed_c10d as torch_c10d
from torch import Tensor
from torch.distributed.tensor.experimental import _context_parallel  # noqa: F401  (registers cplib)
from torch.fx import Graph

from tests.compiler.rank_compile import FORCE, decisions_of, since, world_name
from tests.harness.fake_ranks import FakeRanks
from ub_overlap.compiler.match.collectives import is_collective
from ub_overlap.compiler.plan.decision import Decision
from ub_overlap.compiler.plan.reasons import Kind, Reason
from ub_overlap.runtime import ops

COMMUNICATE = (
    "_c10d_functional::all_gather_into_tensor",
    "_c10d_functional::all_to_all_single",
    "_c10d_functional::broadcast_",
    "_c10d_functional_autograd::all_to_all_single",
    "_dtensor::shard_dim_alltoall",
    "c10d::barrier",
    "c10d::recv_",
    "c10d::recv_any_source_",
    "c10d::send",
    "c10d_functional::all_reduce",
    "cplib::flex_cp_allgather",
    "cplib::flex_cp_allgather_backward",
    "symm_mem::_barrier",
    "symm_mem::fused_all_gather_matmul",
    "symm_mem::nccl_wait_for_signal",
    "symm_mem::nvshmem_put",
    "symm_mem::one_shot_all_reduce",
)
DO_NOT = (
    "_c10d_functional::wait_tensor",
    "aten::mm",
    "aten::native_group_norm",  # its `group` is a number
    "aten::select_scatter",  # of a dim
    "symm_mem::memset32_",  # of the rank's own memory
    "symm_mem::stream_write_value32_",  # likewise
    "ub_overlap::all_gather_matmul",  # a site already
)


def _op(name: str) -> Any:
    namespace, _, op = name.partition("::")
    return getattr(getattr(torch.ops, namespace), op).default


@pytest.mark.parametrize("name", COMMUNICATE + DO_NOT)
def test_is_collective(name: str) -> None:
    ops.extension()  # registers our ops
    node = Graph().call_function(_op(name))
    assert is_collective(node) is (name in COMMUNICATE)


LIBRARY = torch.library.Library("ub_overlap_group_tests", "DEF")
NUMBERS = itertools.count()
GROUP = "__torch__.torch.classes.c10d.ProcessGroup"


@pytest.mark.parametrize(
    ("arguments", "communicates"),
    [
        ("Tensor x, str ep_group_name", True),
        ("Tensor x, str tp_group", True),
        ("Tensor x, str? tp_group=None", True),
        ("Tensor x, Any ep_group_name", True),
        (f"Tensor x, {GROUP} pg", True),
        ("Tensor x, Any process_group", True),
        ("Tensor x, int group", False),
        ("Tensor x, int? group=None", False),
        ("Tensor x, int[] group", False),
        ("Tensor x, Tensor group", False),
        ("Tensor x, str group_by", False),
        ("Tensor x, str regroup", False),
    ],
)
def test_an_argument_that_is_a_group(arguments: str, communicates: bool) -> None:
    """Of any library, by its name or its type. Look-alikes: sizes of groups, and modes."""
    name = f"op_{next(NUMBERS)}"
    LIBRARY.define(f"{name}({arguments}) -> Tensor")
    assert is_collective(Graph().call_function(_op(f"ub_overlap_group_tests::{name}"))) is communicates


@since((2, 13), "does not trace sends and receives")
@pytest.mark.parametrize("name", ["batch_p2p_ops", "irecv", "isend"])
@pytest.mark.parametrize("namespace", ["_c10d_functional", "c10d_functional"])
def test_messages_are_collectives(namespace: str, name: str) -> None:
    assert is_collective(Graph().call_function(_op(f"{namespace}::{name}")))


@torch.library.custom_op("ub_overlap_tests::exchange", mutates_args=())
def exchange(scale: float, x: Tensor, pg_name: str) -> Tensor:
    """A collective of another library: the sum over the ranks of a group, times `scale`."""
    out = x * scale
    torch_c10d.all_reduce(out, group=torch_c10d._resolve_process_group(pg_name))
    return out


@exchange.register_fake
def _(scale: float, x: Tensor, pg_name: str) -> Tensor:
    return torch.empty_like(x)


def foreign(rank: int, world: int) -> tuple[list[Decision], list[Decision]]:
    """Return the decisions of a graph with a foreign collective, of a known and of an unknown group name."""
    x, w = torch.ones(8, 16), torch.ones(16, 8)
    with torch.no_grad():
        known = decisions_of(lambda x, w: exchange(2.0, x, world_name()) @ w, (x, w), FORCE)
    graph = Graph()
    node = graph.call_function(torch.ops.ub_overlap_tests.exchange.default, (2.0, graph.placeholder("x"), "of a library"))
    graph.output(node)
    from ub_overlap.compiler.options import parse
    from ub_overlap.compiler.select.decide import decide

    return known, list(decide(graph, parse(FORCE, frozenset())[0], "forward", lambda *_: None).plan.decisions)


@pytest.mark.tier("test")
def test_a_collective_of_another_library(fake2: FakeRanks) -> None:
    """Its input need not be the first argument, and its group's name may be its own."""
    for known, unknown in fake2.run(foreign):
        for decisions, ranks, shapes in ((known, 2, (("input", "[8, 16]"),)), (unknown, 0, ())):
            (d,) = decisions
            assert (d.kind, d.reason, d.ranks, d.shapes) == (Kind.OTHER, Reason.COLLECTIVE_UNSUPPORTED, ranks, shapes)
            assert "exchange" in d.detail
