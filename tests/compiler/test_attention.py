"""Attention ops of a graph: their operations, with grouped heads, masks and symbolic sizes, and look-alikes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn.attention.flex_attention import flex_attention

from tests.compiler.dags import Dag, aten
from tests.context_parallel.model import flex_gradients_on_cpu
from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.cost import load
from ub_overlap.compiler.cost.attention_time import SHARES, attention_us
from ub_overlap.compiler.cost.profile import AttentionRates, Profile
from ub_overlap.compiler.graph.attention import as_attention
from ub_overlap.compiler.graph.compute import is_compute
from ub_overlap.compiler.windows.node_times import NodeTimes

B, H, S, E = 2, 8, 128, 16


def traced(causal: bool, kv_heads: int, flex: bool) -> list[Node]:
    """Return the attentions of forward and backward graphs that are compiled."""
    nodes: list[Node] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if flex:
            out = flex_attention(q, k, v, enable_gqa=True)
            assert isinstance(out, Tensor)
            return out
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    def note(gm: GraphModule, _inputs: object) -> object:
        nodes.extend(n for n in gm.graph.nodes if as_attention(n) is not None)
        return compat.make_boxed_func(gm.forward)

    torch.compiler.reset()
    inputs = [torch.randn(B, heads, S, E, requires_grad=True) for heads in (H, kv_heads, kv_heads)]
    with compat.caches_off(), flex_gradients_on_cpu():
        torch.compile(attend, backend=compat.aot_autograd(fw_compiler=note, bw_compiler=note))(*inputs).sum().backward()
    torch.compiler.reset()
    return nodes


@pytest.mark.tier("test")
@pytest.mark.parametrize(("causal", "kv_heads", "flex"), [(False, 8, False), (True, 2, False), (False, 2, True)])
def test_operations(causal: bool, kv_heads: int, flex: bool) -> None:
    """Keys and values of fewer heads, which torch's formulas know from 2.12 on, count like those of all heads."""
    forward, backward = map(as_attention, nodes := traced(causal, kv_heads, flex))
    assert forward is not None and backward is not None and all(map(is_compute, nodes))
    assert not forward.is_backward and backward.is_backward
    operations = 4 * B * H * S * S * E
    assert (forward.operations, backward.operations) == (operations, operations * 5 // 2)
    assert forward.share == backward.share == (0.5 if causal else 1.0)
    profile = load("h200")
    times = NodeTimes.of(nodes[0].graph, profile, {})
    rate = profile.compute.tflops["float32"] * 1e6
    assert times.us(nodes[0]) == pytest.approx(operations * forward.share / rate / SHARES[0] + profile.compute.launch_us)


def test_a_sparsity_that_the_user_states() -> None:
    d = Dag()
    operands = [d.input(name, B, H, S, E) for name in "qkv"]
    node = d.call(aten._scaled_dot_product_flash_attention.default, *operands)
    plain = as_attention(node)
    node.meta["custom"] = {"sparsity_hint": 0.75}
    sparse = as_attention(node)
    assert plain is not None and plain.share == 1.0 and sparse is not None and sparse.share == 0.25


def test_measured_rates() -> None:
    """A calibrated rate counts for other dtypes in proportion to their matmuls."""
    base = load("h200")
    measured = replace(base, attention=AttentionRates("bfloat16", 500.0, 400.0))
    assert attention_us(measured, "bfloat16", 1e12, False) == pytest.approx(1e12 / 500e6)
    assert attention_us(measured, "bfloat16", 1e12, True) == pytest.approx(1e12 / 400e6)
    share = base.compute.tflops["float32"] / base.compute.tflops["bfloat16"]
    assert attention_us(measured, "float32", 1e12, True) == pytest.approx(1e12 / 400e6 / share)
    assert Profile.from_json(measured.to_json(), "test") == measured != base


def test_look_alikes() -> None:
    d = Dag()
    q, k = d.input("q", B * H, S, E), d.input("k", B * H, E, S)
    for node in (q, d.call(aten.bmm.default, q, k), d.call(aten._softmax.default, q, -1, False)):
        assert as_attention(node) is None
