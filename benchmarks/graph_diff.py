"""Measure the graph diff on a graph of many nodes: python -m benchmarks.graph_diff [NODES]

The graph has layers of a tensor-parallel block, each rewritten. It is compared before against after (one lineage), and against
a graph of another lineage, with other names and one more node in every hundredth layer.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ub_overlap.compiler.diff.edits import Diff
from ub_overlap.compiler.diff.graph_store import PlanGraphs
from ub_overlap.compiler.diff.render import html, text
from ub_overlap.compiler.diff.snapshot import NodeShot, Snapshot


class SnapshotBuilder:
    def __init__(self) -> None:
        self.nodes: list[NodeShot] = []

    def node(self, target: str, *inputs: int, **more: str) -> int:
        place = len(self.nodes)
        op = more.pop("op", "call_function")
        name = more.pop("name", f"{target.split('.')[1] if '.' in target else target}_{place}")
        self.nodes.append(
            NodeShot(
                name=name, inputs=inputs, op=op, target=target, args=", ".join("%" * len(inputs)), shape="[1024, 1024]",
                dtype="bfloat16", stride="[1024, 1]", **more,
            )
        )  # fmt: skip
        return place


def block(b: SnapshotBuilder, x: int, layer: int, fused: bool) -> int:
    """Add a layer of 20 nodes, or fewer if fused: gather -> 2 matmuls -> activation -> matmul -> scatter."""
    where = {"module": f"layers.{layer}.mlp", "source": "/model.py:10: return self.w2(F.silu(self.w1(x)) * self.w3(x))"}
    c10d, site = "_c10d_functional", {"site": f"forward.{2 * layer}"}
    weights = [b.node(f"w{layer}_{i}", op="placeholder", name=f"w{layer}_{i}") for i in range(3)]
    permuted = [b.node("aten.permute.default", w, name=f"permute_{layer}_{i}", **where) for i, w in enumerate(weights)]
    if fused:
        both = b.node("ub_overlap.all_gather_matmul.default", x, *permuted[:2], **where, **site)
        up, gate = (b.node("getitem", both, **where, **site) for _ in range(2))
    else:
        gathered = b.node(f"{c10d}.all_gather_into_tensor.default", x, **where, **site)
        wait = b.node(f"{c10d}.wait_tensor.default", gathered, **where, **site)
        up, gate = (b.node("aten.mm.default", wait, permuted[i], name=f"mm_{layer}_{i}", **where, **site) for i in range(2))
    for i, op in enumerate(("sigmoid", "neg", "exp", "add", "reciprocal", "mul")):
        up = b.node(f"aten.{op}.default", up, name=f"{op}_{layer}_{i}", **where)
    hidden = b.node("aten.mul.Tensor", up, gate, name=f"mul_{layer}", **where)
    site = {"site": f"forward.{2 * layer + 1}"}
    if fused:
        return b.node("ub_overlap.matmul_reduce_scatter.default", hidden, permuted[2], **where, **site)
    product = b.node("aten.mm.default", hidden, permuted[2], name=f"mm_{layer}_2", **where, **site)
    scattered = b.node(f"{c10d}.reduce_scatter_tensor.default", product, **where, **site)
    return b.node(f"{c10d}.wait_tensor.default", scattered, **where, **site)


def graph(nodes: int, fused: bool, lineage: str, label: str) -> Snapshot:
    b = SnapshotBuilder()
    x = b.node("x", op="placeholder", name="x")
    for layer in range(nodes // 20):
        x = block(b, x, layer, fused)
    b.node("output", x, op="output", name="output")
    return Snapshot(tuple(b.nodes), "forward", label, lineage, "2.13")


def retraced(s: Snapshot) -> Snapshot:
    """Return the graph as another torch version might trace it: other names and lines, and some clones."""
    nodes: list[NodeShot] = []
    where: list[int] = []
    for place, n in enumerate(s.nodes):
        inputs = tuple(where[i] for i in n.inputs)
        if n.op == "call_function" and place % 2000 == 7:
            nodes.append(
                NodeShot(name=f"clone_{place}", inputs=inputs[:1], target="aten.clone.default", args="%", shape=n.shape)
            )
            inputs = (len(nodes) - 1, *inputs[1:])
        where.append(len(nodes))
        name = n.name if n.op != "call_function" else f"other_{place}"
        nodes.append(n._replace(name=name, inputs=inputs, source=n.source.replace(":10:", ":11:")))
    return Snapshot(tuple(nodes), s.phase, "another", "", "2.11")


def main(nodes: int) -> None:
    before, after = graph(nodes, False, "one", "before"), graph(nodes, True, "one", "after")
    other = retraced(before)
    graphs = PlanGraphs("0" * 16, "forward", before, after)

    def say(what: str, run: Callable[[], Any]) -> None:
        begin = time.perf_counter()
        result = run()
        print(f"{what:32} {time.perf_counter() - begin:7.3f} s   {result}")

    print(f"{len(before.nodes)} nodes before, {len(after.nodes)} after, {len(other.nodes)} of another torch")
    say("before against after", lambda: Diff(before, after).counts())
    say("against another torch", lambda: Diff(before, other).counts())
    say("unified text", lambda: f"{len(text.unified(graphs.diff()))} characters")
    say("pack", lambda: f"{len(graphs.pack())} bytes")
    packed = graphs.pack()
    say("unpack", lambda: f"{len(PlanGraphs.unpack(packed).before.nodes)} nodes")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "page.html")
        report = {"version": 1, "plans": [graphs.plan], "sites": [], "graphs": [graphs.to_dict()]}
        say("page", lambda: f"{html.write(path, report).stat().st_size} bytes")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)
