"""Graphs of collectives and matmuls in AOTAutograd's form, built node by node without tracing or ranks."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ub_overlap import _torch_compat as compat

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


@dataclass
class Dag:
    """Graph builder that appends nodes with fake values. `group` must exist only if the graph is run."""

    ranks: int = 2
    group: str = "g"
    dtype: torch.dtype = torch.bfloat16
    graph: Graph = field(default_factory=Graph)
    mode: Any = field(default_factory=lambda: compat.FakeTensorMode())

    def input(self, name: str, *shape: int) -> Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=self.dtype)
        return node

    def call(self, op: Any, *args: Any) -> Node:
        node = self.graph.call_function(op, args)
        with self.mode:
            node.meta["val"] = op(*torch.fx.node.map_arg(args, lambda n: n.meta["val"]))
        return node

    def mm(self, a: Node, b: Node) -> Node:
        return self.call(aten.mm.default, a, b)

    def t(self, a: Node) -> Node:
        return self.call(aten.permute.default, a, [1, 0])

    def gather(self, x: Node) -> Node:
        """Append an all_gather [m, n] -> [R m, n] and return its wait."""
        return self.call(c10d.wait_tensor.default, self.call(c10d.all_gather_into_tensor.default, x, self.ranks, self.group))

    def scatter(self, x: Node) -> Node:
        """Append a reduce_scatter [R m, n] -> [m, n] and return its wait."""
        made = self.call(c10d.reduce_scatter_tensor.default, x, "sum", self.ranks, self.group)
        return self.call(c10d.wait_tensor.default, made)

    def output(self, *nodes: Node) -> Graph:
        self.graph.output(tuple(nodes))
        self.graph.lint()
        return self.graph


def module_of(graph: Graph) -> GraphModule:
    return GraphModule(torch.nn.Module(), graph)


def random_dag(seed: int, ranks: int = 2, group: str = "g", nodes: int = 9, dtype: torch.dtype = torch.bfloat16) -> Graph:
    """Return a graph with a random mix of matmuls, gathers, scatters, sums and a few writes.

    Full tensors are [R m, n], shards are [m, n]. Sizes are drawn so that gains differ.
    """
    draw = random.Random(seed)
    d = Dag(ranks, group, dtype)
    small = dtype == torch.float32
    n = 8 if small else draw.choice([2048, 4096])
    rows = ranks * (4 if small else draw.choice([1024, 2048]))
    weights = [d.input(f"w{i}", n, n) for i in range(2)]
    wholes = [d.input(f"x{i}", rows, n) for i in range(2)]
    shards = [d.input(f"s{i}", rows // ranks, n) for i in range(2)]
    grads: list[Node] = []
    for _ in range(nodes):
        kind = draw.choice(["mm", "mm", "wgrad", "wgrad", "gather", "scatter", "add", "write" if draw.random() < 0.2 else "mm"])
        if kind == "mm":
            wholes.append(d.mm(draw.choice(wholes[-2:]), draw.choice(weights)))
        elif kind == "wgrad":
            grads.append(d.mm(d.t(draw.choice(wholes)), draw.choice(wholes)))
        elif kind == "gather":
            wholes.append(d.gather(draw.choice(shards)))
        elif kind == "scatter":
            shards.append(d.scatter(draw.choice(wholes)))
        elif kind == "add":
            wholes.append(d.call(aten.add.Tensor, draw.choice(wholes), draw.choice(wholes)))
        else:
            d.call(aten.mul_.Tensor, draw.choice(weights), 0.5)
    return d.output(*wholes, *shards, *grads)


def inputs_of(graph: Graph, rank: int) -> list[Tensor]:
    """Return small integer values for every placeholder, different on each rank."""
    made = torch.Generator().manual_seed(rank)
    values = [n.meta["val"] for n in graph.nodes if n.op == "placeholder"]
    return [torch.randint(-1, 2, v.shape, generator=made).to(v.dtype) for v in values]
