"""The clocks of device and host: what many short kernels behind a read cost, and collectives that go on meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node

from ub_overlap.compiler.cost.host_time import COLLECTIVE_HOST_US, HOST_US, host_us
from ub_overlap.compiler.graph.aten import aten
from ub_overlap.compiler.select.graph_time import READ_US, issue
from ub_overlap.compiler.windows.layout import GraphLayout
from ub_overlap.compiler.windows.placement import Placed
from ub_overlap.runtime.ops import host_read as host_read  # registers the ops

READ = "read"
BEGIN, END = "begin", "end"


@dataclass
class Window:
    """As much of a window as is read."""

    collective: Any
    each: list[Any] = field(default_factory=list)


class Times:
    def __init__(self, us: dict[Node, float]) -> None:
        self.known = us

    def us(self, node: Node) -> float:
        return self.known.get(node, 0.0)


def time_of(
    steps: Sequence[Any], exposed: dict[str, float] | None = None, windows: dict[str, tuple[int, int]] | None = None
) -> float:
    """Return the time of kernels (microseconds, or their op with them), reads and host reads in two halves.

    `windows`: by site the places in `steps` of its start and finish.
    """
    graph = Graph()
    source = graph.placeholder("source")
    source.meta["val"] = torch.empty(4, dtype=torch.int64, device="meta")
    ops, us, nodes, started = torch.ops.ub_overlap, dict[Node, float](), list[Node](), source
    for step in steps:
        if step == READ:
            node = graph.call_function(aten._local_scalar_dense.default, (source,))
        elif step == BEGIN:
            node = started = graph.call_function(ops.start_host_read.default, ([source],))
        elif step == END:
            node = graph.call_function(ops.finish_host_read.default, (started, []))
        else:
            op, kernel_us = step if isinstance(step, tuple) else (aten.neg.default, step)
            node = graph.call_function(op, (source,))
            us[node] = kernel_us
        nodes.append(node)
    layout = None
    if windows:
        entries: dict[str, Any] = {}
        for number, (site, (start, finish)) in enumerate(windows.items()):
            placed = Placed(start, number, finish, number, 0, 0.0, 0.0)
            entries[site] = (Window(None, []), placed)
        layout = GraphLayout(tuple(nodes), entries)
    return issue(nodes, layout, Times(us), exposed or {})  # type: ignore[arg-type]


def test_without_a_read_the_host_is_ahead() -> None:
    assert time_of([1.0] * 50 + [300.0]) == 350
    assert time_of([1.0] * 50, exposed={"plain": 40.0}) == 90


def test_short_kernels_behind_a_read_wait_for_the_host() -> None:
    assert time_of([100.0, READ, *[1.0] * 20]) == pytest.approx(100 + READ_US + 20 * HOST_US + 1)


def test_a_long_kernel_lets_the_host_get_ahead() -> None:
    begun = 100 + READ_US + HOST_US
    assert time_of([100.0, READ, 1000.0, *[1.0] * 20]) == pytest.approx(begun + 1000 + 20)
    assert time_of([100.0, READ, *[1.0] * 20, 1000.0]) == pytest.approx(begun + 20 * HOST_US + 1000)


def test_an_op_of_many_kernels() -> None:
    op = aten.sort.stable
    assert time_of([100.0, READ, (op, 5.0)]) == pytest.approx(100 + READ_US + host_us(op) + 5)


def test_a_read_in_two_halves() -> None:
    """What is computed in between hides the host's wait."""
    assert time_of([100.0, BEGIN, 500.0, END, 1.0]) == 601
    late = time_of([100.0, BEGIN, END, 500.0, 1.0])
    assert late == pytest.approx(100 + READ_US + HOST_US + 500 + 1)


def test_a_collective_goes_on_while_the_device_idles() -> None:
    steps = [100.0, READ, *[1.0] * 20, 5.0]
    plain = time_of(steps)
    assert time_of(steps, {"a": 1000.0}, {"a": (2, 22)}) == pytest.approx(125 + 1000)  # longer than the device idles
    started = plain + COLLECTIVE_HOST_US + HOST_US
    assert time_of(steps, {"a": 10.0}, {"a": (2, 22)}) == pytest.approx(started)  # hidden by it


def test_two_collectives_do_not_share_the_same_idle_time() -> None:
    steps = [100.0, READ, *[1.0] * 20, 5.0]
    one = time_of(steps, {"a": 500.0}, {"a": (2, 22)})
    two = time_of(steps, {"a": 500.0, "b": 500.0}, {"a": (2, 22), "b": (2, 22)})
    assert two >= one + 400
    assert two >= time_of(steps) + 500
