"""The time of one node of a graph, for the clock that split collectives are placed by.

    matmul              the cost model's (cost/matmul_time.py)
    attention           its operations at a share of the matmul rate (cost/attention_time.py)
    groups of matmuls   the cost model's, also for batches (cost/grouped_time.py)
    ops with a formula  operations of torch's flop counter (convolutions) at a share of the matmul rate
    other ops           bytes read and written at the rate of memory; nothing for views and for what is fused into its readers
    sorts, and others   of several kernels: a short time more for each of them
    around collectives  nothing: casts, pads and sums next to one may differ between ranks, and the clock must not

Only the sum over some milliseconds matters: a start or a finish moves by a few nodes where a time is wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from ..cost.attention_time import attention_us
from ..cost.grouped_time import grouped_us
from ..cost.host_time import kernels_of
from ..cost.matmul_time import matmul_us
from ..cost.profile import Profile
from ..cost.site_shape import SIZES
from ..cost.site_sizes import Hints
from ..graph.aten import alias_base, dtype_of, storage_node, tensor_of
from ..graph.attention import FusedAttention, as_attention
from ..graph.compute import find_flop_formula, is_compute
from ..graph.grouped_matmul import BATCH, GroupedMatmul, as_grouped_matmul
from ..graph.matmul import as_matmul
from ..graph.sizes import about, as_sizes, evaluate_size
from ..match.collectives import Collective, is_collective
from ..match.site import Reduction
from ..match.window import WindowFinder
from ..select.peak_memory import bytes_of, is_fused

EFFICIENCY = 0.6
"""The share of the matmul rate that ops with a formula reach. Assumed."""

SHORT_US = 5.0
"""The time of a short kernel of an op that has several, with the gap in front of it. Measured with sorts of 12288 integers."""


def _is_causal(node: Node) -> bool:
    """Return whether an op computes half of what its formula counts: attention to sequences of other lengths."""
    for i, a in enumerate(getattr(getattr(node.target, "_schema", None), "arguments", ())):
        if a.name == "is_causal":
            return bool(node.args[i] if i < len(node.args) else node.kwargs.get("is_causal", False))
    return False


@dataclass(slots=True)
class NodeTimes:
    """Times of the nodes of one graph. `inner`: nodes that are computed in the kernels of their readers. `untimed`: nodes that
    other ranks may not have. `only_compute`: graphs differ between ranks (rings), but mostly not in what they multiply."""

    profile: Profile
    hints: Hints
    inner: set[Node]
    untimed: Collection[Node] = ()
    only_compute: bool = False
    _known: dict[tuple[Any, ...], float] = field(default_factory=dict)

    @classmethod
    def of(
        cls, graph: Graph, profile: Profile, hints: Hints, untimed: Collection[Node] = (), only_compute: bool = False
    ) -> NodeTimes:
        fused = {n for n in graph.nodes if is_fused(n) and n not in untimed}
        return cls(profile, hints, {n for n in fused if n.users and all(u in fused for u in n.users)}, untimed, only_compute)

    def us(self, node: Node) -> float:
        """Return the microseconds of `node`; 0 for what computes nothing, and for collectives, which are priced apart."""
        if node in self.untimed or (self.only_compute and not is_compute(node)):
            return 0.0
        if node.op != "call_function" or node.meta.get("val") is None or alias_base(node) is not None or is_collective(node):
            return 0.0
        if (matmul := as_matmul(node)) is not None:
            return self._matmul_us(matmul)
        if (grouped := as_grouped_matmul(node)) is not None:
            return self._grouped_us(grouped)
        if (attention := as_attention(node)) is not None:
            return self._attention_us(attention)
        if find_flop_formula(node.target) is not None:
            return self._counted_us(node)
        return 0.0 if node in self.inner else self._moved_us(node)

    def _matmul_us(self, matmul: Any) -> float:
        sizes = [evaluate_size(s, self.hints) for s in (*matmul.shape, matmul.inner)]
        name = "float8" if matmul.scales is not None else str(dtype_of(matmul.node)).removeprefix("torch.")
        if None in sizes or name not in SIZES:
            return 0.0
        m, n, k = (about(s) for s in sizes if s is not None)
        return matmul_us(self.profile, name, "nt", m, n, k)

    def _grouped_us(self, matmul: GroupedMatmul) -> float:
        sizes = [evaluate_size(s, self.hints) for s in (matmul.groups, matmul.m, matmul.n, matmul.k)]
        if None in sizes or matmul.dtype not in SIZES:
            return 0.0
        groups, *members = (s for s in sizes if s is not None)
        if matmul.divided == BATCH:  # a small size of all members, rounded, would be a tile in each
            groups, *members = (about(s) if s >= 64 else s for s in (groups, *members))
        else:
            members = [about(s) for s in members]
        m, n, k = members
        return grouped_us(self.profile, matmul.dtype, groups, m, n, k, matmul.divided)

    def _attention_us(self, attention: FusedAttention) -> float:
        dtype = str(attention.dtype).removeprefix("torch.")
        operations = evaluate_size(attention.operations, self.hints)
        us = attention_us(self.profile, dtype, operations * attention.share, attention.is_backward) if operations else 0.0
        return us + self.profile.compute.launch_us

    def _counted_us(self, node: Node) -> float:
        value = tensor_of(node)
        first = value if value is not None else next((v for v in node.meta["val"] if isinstance(v, torch.Tensor)), None)
        key = (node.target, *(str(a.meta.get("val")) if isinstance(a, Node) else str(a) for a in node.args), str(node.kwargs))
        if key not in self._known:
            self._known[key] = self._flops(node)
        return self._rate_us(self._known[key], str(first.dtype) if first is not None else "")

    def _rate_us(self, flops: float, dtype: str) -> float:
        rates = self.profile.compute.tflops
        rate = rates.get(dtype.removeprefix("torch."), rates["bfloat16"])
        return flops / (rate * 1e6 * EFFICIENCY) + self.profile.compute.launch_us

    def _flops(self, node: Node) -> float:
        formula = find_flop_formula(node.target)
        assert formula is not None
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self._value_of)  # type: ignore[misc]
        try:
            return float(formula(*args, **kwargs, out_val=self._value_of(node))) * (0.5 if _is_causal(node) else 1.0)
        except (
            TypeError,
            ValueError,
            AssertionError,
            AttributeError,
            RuntimeError,
            KeyError,
        ):  # a formula of torch or of the user's that does not know these arguments: no estimate
            return 0.0

    def _value_of(self, node: Node) -> Any:
        """Return the value of `node` with numbers for symbolic sizes; as it is where one has no hint."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or all(isinstance(s, int) for s in value.shape):
            return value
        sizes = [evaluate_size(s, self.hints) for s in as_sizes(value.shape)]
        return value if None in sizes else torch.empty(sizes, dtype=value.dtype, device="meta")  # type: ignore[arg-type]

    def _moved_us(self, node: Node) -> float:
        sources = {storage_node(i) for i in self._read(node)}
        moved = bytes_of(node, self.hints) + sum(bytes_of(s, self.hints) for s in sources)
        us = moved / (self.profile.compute.memory_gbs * 1e3) + (self.profile.compute.launch_us if moved else 0.0)
        return us + SHORT_US * (kernels_of(node.target) - 1)

    def _read(self, node: Node) -> list[Node]:
        """Return what the kernel of `node` reads: through nodes that it computes itself."""
        found, todo, seen = [], list(node.all_input_nodes), set[Node]()
        while todo:
            n = todo.pop()
            if n in seen:
                continue
            seen.add(n)
            if n in self.inner:
                todo += n.all_input_nodes
            else:
                found.append(n)
        return found


def next_to_collectives(graph: Graph, collectives: Iterable[tuple[Collective, object]]) -> set[Node]:
    """Return the nodes that move, cast, scale or add to what collectives send and return. Each comes with its match, if any.

    They may differ between ranks: one pads its shard of an uneven parameter, one adds a bias.
    """
    finder, found = WindowFinder(graph), set[Node]()
    for c, match in collectives:
        if c.op is not None and c.wait is not None:
            window = finder.find(c)
            found.update(window.lead, window.trail)
        if isinstance(match, Reduction):
            found.update(match.inner, match.view_chain)
    return found
