"""In the code that Inductor generates, attention runs between the start and the finish of the exchanges that it hides."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.blocks.model import SIZES
from benchmarks.context_parallel.model import ContextAttention, ContextLayer
from tests.harness.generated_code import matching_lines
from tests.harness.ranks import RankPool
from tests.models.compare import uncached
from ub_overlap.compiler.inductor import kernel_order
from ub_overlap.tools.planner.ring_attention import ring_attention

LAYERS, POSITIONS = 2, 256


def calls(rank: int, world: int, options: dict[str, Any], keeps_order: bool = True) -> list[list[str]]:
    """Return of each generated program its exchanges and attentions in order: "start backward.0", "attention"."""
    sizes, mesh = SIZES["tiny"], init_device_mesh("cpu", (world,))
    torch.manual_seed(3)
    layers = [ContextLayer(sizes, ContextAttention(sizes, "ring", mesh, POSITIONS, False)) for _ in range(LAYERS)]
    compiled = torch.compile(nn.Sequential(*layers), backend="ub_overlap", options=options)
    x = torch.randn(1, POSITIONS, sizes.dim, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch, ring_attention("alltoall", load_balance=False), uncached():
        if not keeps_order:
            patch.setattr(kernel_order, "in_order", list)
        _, written = run_and_get_code(lambda: compiled(x).square().sum().backward())
    pattern = r"(start|finish)_all_to_all\.default\(.*'[\w-]+/(\w+\.\d+)'|= torch\.ops\.aten\.(_scaled_dot)\w+\.default\("
    programs = [program for program in matching_lines(written, pattern) if program]
    return [["attention" if m[3] else f"{m[1]} {m[2]}" for m in program] for program in programs]


FORWARD = ["start forward.0", "attention", "finish forward.0", "attention"]
BACKWARD = ["attention", "start backward.0", "attention", "finish backward.0", "start backward.1", "finish backward.1"]


def of_layer(program: list[str], layer: int, exchanges: int) -> list[str]:
    """Return the calls of one layer, with the numbers of the first. `exchanges`: of each layer."""
    size = len(program) // LAYERS
    return [
        re.sub(r"\.(\d+)", lambda m: f".{int(m[1]) - exchanges * layer}", call)
        for call in program[size * layer : size * (layer + 1)]
    ]


@pytest.mark.tier("full")
def test_attention_hides_the_exchanges_of_all_layers(pool2: RankPool, options: dict[str, Any]) -> None:
    """Inductor merges the sums of both layers' norms in one kernel, and would draw all attention of the first one forward."""
    inductor = {**options, "inner": "inductor"}
    results = pool2.run(calls, inductor)
    assert results[0] == results[1]
    forward, backward = results[0]
    for layer in range(LAYERS):
        assert of_layer(forward, layer, 1) == FORWARD
        assert of_layer(backward, layer, 2) == BACKWARD


@pytest.mark.tier("full")
def test_the_order_is_held_behind_fusion(pool2: RankPool, options: dict[str, Any]) -> None:
    """Without it the last layer of backward exposes both exchanges: the test above can fail."""
    _, backward = pool2.run(calls, {**options, "inner": "inductor"}, False)[0]
    assert of_layer(backward, 0, 2) == BACKWARD
    assert of_layer(backward, 1, 2) != BACKWARD
