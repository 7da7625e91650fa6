"""The cost model's times of grouped matmuls, against the stored measurement, and their sizes as a graph has them."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import torch

from benchmarks.grouped_matmul.table import FORMS, predicted_us
from tests.compiler.dags import Dag, aten
from ub_overlap.compiler.cost import load
from ub_overlap.compiler.cost.grouped_time import grouped_us
from ub_overlap.compiler.cost.matmul_time import matmul_us
from ub_overlap.compiler.graph.grouped_matmul import GroupedMatmul, as_grouped_matmul
from ub_overlap.compiler.windows.node_times import NodeTimes

MEASURED = Path(__file__).resolve().parents[2] / "docs" / "data" / "grouped_matmul_h200.json"


@pytest.mark.parametrize("form", FORMS)
def test_errors_against_measured_times(form: str) -> None:
    """Mean and 90% of the errors stay as small as documented."""
    shapes = json.loads(MEASURED.read_text())["shapes"]
    errors = [
        predicted_us(load("h200"), form, *map(int, sizes.split())) / us - 1
        for (kind, sizes), us in ((shape.split(maxsplit=1), us) for shape, us in shapes.items())
        if kind == form
    ]
    mean, most = {"batch": (0.09, 0.2), "float8": (0.11, 0.25)}.get(form, (0.06, 0.13))
    assert len(errors) > 1000 and statistics.mean(map(abs, errors)) < mean
    assert sum(abs(error) < most for error in errors) > 0.9 * len(errors)


def test_groups_of_other_types_and_devices_are_a_loop() -> None:
    """torch has grouped kernels for bfloat16 and float8 on GPUs alone."""
    h200, cpu = load("h200"), load("cpu")
    assert grouped_us(h200, "float16", 4, 512, 64, 64, "m") == 4 * matmul_us(h200, "float16", "nt", 128, 64, 64)
    assert grouped_us(cpu, "bfloat16", 4, 64, 64, 512, "k") == 4 * matmul_us(cpu, "bfloat16", "tn", 64, 64, 128)
    assert grouped_us(h200, "bfloat16", 4, 0, 64, 64, "m") == 0 == grouped_us(h200, "bfloat16", 0, 8, 64, 64, "m")


def test_a_batch_reads_all_right_operands() -> None:
    """64 rows for each of 64 matrices take as long as reading the matrices does, unlike 4096 rows for one."""
    h200 = load("h200")
    read_us = 64 * 4096 * 4096 * 2 / (h200.compute.memory_gbs * 1e3)
    assert (
        grouped_us(h200, "bfloat16", 64, 64, 4096, 4096, "") > read_us > 2 * matmul_us(h200, "bfloat16", "nt", 4096, 4096, 4096)
    )


@pytest.mark.parametrize("sizes", [(8192, 1, 2048, 6), (8192, 1, 1, 4096), (4096, 64, 64, 2)])
def test_thin_members_of_a_batch_move_bytes(sizes: tuple[int, int, int, int]) -> None:
    """The sum over a token's experts, products of rows, and outer products are no tiles, also where the graph prices them."""
    h200, (groups, m, n, k) = load("h200"), sizes
    d = Dag()
    node = d.call(aten.bmm.default, d.input("x", groups, m, k), d.input("y", groups, k, n))
    bytes_us = groups * (m * k + k * n + m * n) * 2 / (h200.compute.memory_gbs * 1e3)
    for us in (grouped_us(h200, "bfloat16", *sizes, ""), NodeTimes.of(d.graph, h200, {}).us(node)):
        assert bytes_us < us < 1.1 * bytes_us + 2 * h200.compute.launch_us


def test_sizes_in_a_graph() -> None:
    d = Dag()
    ends = d.call(torch.ops.prims.convert_element_type.default, d.input("ends", 8), torch.int32)
    x, y, w = d.input("x", 4096, 2048), d.input("y", 4096, 1024), d.input("w", 8, 2048, 1024)
    batch, plain = d.input("batch", 8, 512, 2048), d.input("plain", 2048, 4096)
    found = [
        as_grouped_matmul(d.call(aten._grouped_mm.default, x, w, ends)),
        as_grouped_matmul(d.call(aten._grouped_mm.default, d.t(x), y, ends)),
        as_grouped_matmul(d.call(aten._grouped_mm.default, batch, plain, ends)),
        as_grouped_matmul(d.call(aten.bmm.default, batch, w)),
    ]
    assert found == [
        GroupedMatmul(8, 4096, 1024, 2048, "m", "bfloat16"),
        GroupedMatmul(8, 2048, 1024, 4096, "k", "bfloat16"),
        GroupedMatmul(8, 512, 4096, 2048, "n", "bfloat16"),
        GroupedMatmul(8, 512, 1024, 2048, "", "bfloat16"),
    ]
    assert as_grouped_matmul(x) is None and as_grouped_matmul(d.mm(d.t(x), y)) is None
