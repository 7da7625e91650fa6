"""Times of ops of several kernels, for the clock that split collectives are placed by. Other times: with what uses them."""

from __future__ import annotations

import pytest

from tests.compiler.dags import Dag, aten
from ub_overlap.compiler.cost.host_time import HOST_US, INNER_HOST_US, KERNELS, host_us
from ub_overlap.compiler.cost.profile_lookup import load
from ub_overlap.compiler.windows.node_times import SHORT_US, NodeTimes


def test_a_sort_of_few_integers_takes_the_time_of_its_kernels() -> None:
    d = Dag(2)
    x = d.input("x", 8, 1024)
    short, sort = d.call(aten.neg.default, x), d.call(aten.sort.default, x)
    graph = d.output(short, d.call(aten.cumsum.default, x, 0), sort)
    times, profile = NodeTimes.of(graph, load("h100"), {}), load("h100")
    assert times.us(short) < 2 * profile.compute.launch_us
    assert times.us(sort) - times.us(short) == pytest.approx(SHORT_US * (KERNELS[aten.sort.default] - 1), rel=0.1)


def test_the_host_issues_each_kernel_of_an_op() -> None:
    assert host_us(aten.neg.default) == HOST_US
    assert host_us(aten.topk.default) == HOST_US + 5 * INNER_HOST_US
