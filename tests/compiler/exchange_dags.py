"""Graphs of exchanges: dispatch, experts and combine of layers, with constant rows or with numbers that the host reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from tests.compiler.dags import Dag, aten, c10d
from ub_overlap import _torch_compat as compat

ROWS, WIDTH = 16, 8
LAYER = ["dispatch 0", "experts 0", "combine 0", "sum 0", "dispatch 1", "experts 1", "combine 1", "sum 1"]
PAIRED = ["dispatch 0", "dispatch 1", "experts 0", "combine 0", "experts 1", "combine 1", "sum 0", "sum 1"]


class ExchangeDag(Dag):
    """Builder of graphs with exchanges. `names`: what `order` calls a node."""

    def __init__(self, rows: int = ROWS, width: int = WIDTH) -> None:
        super().__init__()
        self.rows, self.width = rows, width
        self.names: dict[Node, str] = {}

    def named(self, name: str, node: Node) -> Node:
        self.names[node] = name
        return node

    def exchange(self, name: str, x: Node, splits: Sequence[int | Node] = ()) -> Node:
        """Append an all_to_all of `name` and return its wait. `splits`: the rows for each rank, even unless given."""
        rows = list(splits) or [x.meta["val"].shape[0] // self.ranks] * self.ranks
        node = self.graph.call_function(c10d.all_to_all_single.default, (x, rows, rows, self.group))
        node.meta["val"] = x.meta["val"]
        self.named(name, node)
        return self.call(c10d.wait_tensor.default, node)

    def relu(self, x: Node) -> Node:
        return self.call(aten.relu.default, x)

    def cast(self, x: Node, dtype: torch.dtype) -> Node:
        return self.call(torch.ops.prims.convert_element_type.default, x, dtype)

    def tokens(self, number: int) -> tuple[Node, Node]:
        """Return tokens and the weight of their expert."""
        return self.input(f"x{number}", self.rows, self.width), self.input(f"w{number}", self.width, self.width)

    def layer(self, number: int, tokens: tuple[Node, Node], splits: Sequence[int | Node] = ()) -> Node:
        """Append dispatch, experts, combine and sum of `tokens`. Return the sum. `splits`: as of `exchange`."""
        sent = self.exchange(f"dispatch {number}", tokens[0], splits)
        back = self.exchange(f"combine {number}", self.named(f"experts {number}", self.mm(sent, tokens[1])), splits)
        return self.named(f"sum {number}", self.relu(back))

    def layers(self, count: int) -> Graph:
        """Return a graph of `count` independent layers, one behind the other."""
        tokens = [self.tokens(i) for i in range(count)]
        return self.output(*[self.layer(i, t) for i, t in enumerate(tokens)])

    def order(self) -> list[str]:
        return [self.names[n] for n in self.graph.nodes if n in self.names]


class ReadDag(ExchangeDag):
    """Builder of graphs whose exchanges have numbers that the host reads."""

    def __init__(self, width: int = 64) -> None:
        super().__init__(width=width)
        self.shapes = compat.ShapeEnv()

    def counts(self, number: int, x: Node, weight: Node | None = None) -> Node:
        """Append a router of `x`, with a matmul, and the exchange of its counts. Return their wait."""
        routed = x if weight is None else self.mm(x, weight)
        narrow = self.call(aten.view.default, self.call(aten.sum.dim_IntList, routed, [1]), [self.rows])
        return self.exchange(f"counts {number}", self.named(f"route {number}", self.cast(narrow, torch.int64)))

    def number(self, number: int, counts: Node) -> Node:
        """Append a read of the first of `counts`."""
        read = self.graph.call_function(aten._local_scalar_dense.default, (self.call(aten.select.int, counts, 0, 0),))
        read.meta["val"] = self.shapes.create_unbacked_symint()
        return self.named(f"read {number}", read)
