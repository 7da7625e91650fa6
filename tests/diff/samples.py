"""Small hand-written graphs: a tensor-parallel MLP before and after its rewrite, and variants of other ranks and versions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ub_overlap.compiler.diff.graph_store import PlanGraphs
from ub_overlap.compiler.diff.snapshot import NodeShot, Snapshot

PLAN = "00112233aabbccdd"
LINE = "/home/me/model.py:12: return self.w2(F.relu(self.w1(x)))"


class Builder:
    """Builder of snapshots whose nodes and inputs are given by name."""

    def __init__(self, **shared: str) -> None:
        self.nodes: list[NodeShot] = []
        self._places: dict[str, int] = {}
        self._shared = shared

    def add(self, name: str, target: str, *inputs: str, args: str | None = None, **more: str) -> Builder:
        op = "placeholder" if target == "placeholder" else "output" if target == "output" else "call_function"
        own = self._shared if op == "call_function" else {}
        self._places[name] = len(self.nodes)
        self.nodes.append(
            NodeShot(
                name=name,
                op=op,
                target=name if op == "placeholder" else target,
                inputs=tuple(self._places[i] for i in inputs),
                args=", ".join("%" * len(inputs)) if args is None else args,
                **{"dtype": "bfloat16" if op != "output" else "", **own, **more},
            )
        )
        return self

    def snapshot(self, label: str, lineage: str = "", torch: str = "2.13.0") -> Snapshot:
        return Snapshot(tuple(self.nodes), "forward", label, lineage, torch)


def before(rows: int = 64, lineage: str = "one", label: str = "before", **shared: str) -> Snapshot:
    """Return the graph before the rewrite.

    x -> all_gather -> two matmuls -> relu, add -> matmul -> reduce_scatter; and an all_reduce that is not overlapped.
    """
    b = Builder(**{"module": "mlp", "source": LINE, **shared})
    s0, s1, c = {"site": "forward.0"}, {"site": "forward.1"}, "_c10d_functional"
    m, whole, wide = f"[{rows}, 32]", f"[{2 * rows}, 32]", f"[{2 * rows}, 48]"
    b.add("x", "placeholder", shape=m)
    for w in ("w1", "w3"):
        b.add(w, "placeholder", shape="[48, 32]")
    b.add("w2", "placeholder", shape="[32, 48]")
    b.add("gather", f"{c}.all_gather_into_tensor.default", "x", args="%, 2, g0", shape=whole, **s0)
    b.add("wait", f"{c}.wait_tensor.default", "gather", shape=whole, **s0)
    b.add("t", "aten.t.default", "w1", shape="[32, 48]").add("mm", "aten.mm.default", "wait", "t", shape=wide, **s0)
    b.add("t_1", "aten.t.default", "w3", shape="[32, 48]").add("mm_1", "aten.mm.default", "wait", "t_1", shape=wide, **s0)
    b.add("relu", "aten.relu.default", "mm", shape=wide).add("mul", "aten.mul.Tensor", "relu", "mm_1", shape=wide)
    b.add("t_2", "aten.t.default", "w2", shape="[48, 32]").add("mm_2", "aten.mm.default", "mul", "t_2", shape=whole, **s1)
    b.add("scatter", f"{c}.reduce_scatter_tensor.default", "mm_2", args="%, 'sum', 2, g0", shape=m, **s1)
    b.add("wait_1", f"{c}.wait_tensor.default", "scatter", shape=m, **s1)
    b.add("norm", f"{c}.all_reduce.default", "x", args="%, 'sum', g0", shape=m, site="forward.2")
    b.add("wait_2", f"{c}.wait_tensor.default", "norm", shape=m).add("add", "aten.add.Tensor", "wait_1", "wait_2", shape=m)
    return b.add("output", "output", "add", args="[%]").snapshot(label, lineage)


def after() -> Snapshot:
    b = Builder(module="mlp", source=LINE)
    s0, s1 = {"site": "forward.0"}, {"site": "forward.1"}
    b.add("x", "placeholder", shape="[64, 32]")
    for w in ("w1", "w3"):
        b.add(w, "placeholder", shape="[48, 32]")
    b.add("w2", "placeholder", shape="[32, 48]")
    b.add("t", "aten.t.default", "w1", shape="[32, 48]").add("t_1", "aten.t.default", "w3", shape="[32, 48]")
    wide, said = "[128, 48]", "%, [%, %], [0, 0], 1, False, False, 'pipelined', g0, 'forward.0'"
    b.add("fused", "ub_overlap.all_gather_matmul.default", "x", "t", "t_1", args=said, shape=f"[0] {wide} {wide}", **s0)
    for name, source, k in (("outs", "fused", 1), ("out", "outs", 0), ("out_1", "outs", 1)):
        b.add(name, "getitem", source, args=f"%, {k}", shape=f"{wide} {wide}" if name == "outs" else wide, **s0)
    b.add("relu", "aten.relu.default", "out", shape=wide).add("mul", "aten.mul.Tensor", "relu", "out_1", shape=wide)
    b.add("t_2", "aten.t.default", "w2", shape="[48, 32]")
    said = "[%], [%], None, 1, False, 'sum', bfloat16, False, 'pipelined', g0, 'forward.1'"
    b.add("fused_1", "ub_overlap.matmul_reduce_scatter.default", "mul", "t_2", args=said, shape="[64, 32] [0]", **s1)
    b.add("out_2", "getitem", "fused_1", args="%, 0", shape="[64, 32]", **s1)
    b.add("norm", "_c10d_functional.all_reduce.default", "x", args="%, 'sum', g0", shape="[64, 32]", site="forward.2")
    b.add("wait_2", "_c10d_functional.wait_tensor.default", "norm", shape="[64, 32]")
    b.add("add", "aten.add.Tensor", "out_2", "wait_2", shape="[64, 32]")
    return b.add("output", "output", "add", args="[%]").snapshot("after", "one")


def renamed(s: Snapshot, label: str = "another run") -> Snapshot:
    """Return the same graph with other names and line numbers, as after an edit of the code."""
    nodes = tuple(
        n._replace(name=n.name if n.op != "call_function" else f"n{i}", source=n.source.replace(":12:", ":99:"))
        for i, n in enumerate(s.nodes)
    )
    return replace(s, nodes=nodes, label=label, lineage="")


def with_clone(s: Snapshot) -> Snapshot:
    """Return the graph with a clone inserted between the relu and its readers; later node indices are shifted."""
    nodes: list[NodeShot] = []
    where: list[int] = []
    for n in s.nodes:
        where.append(len(nodes))
        nodes.append(n._replace(inputs=tuple(where[i] for i in n.inputs)))
        if n.name == "relu":
            nodes.append(n._replace(name="clone", target="aten.clone.default", inputs=(len(nodes) - 1,)))
            where[-1] = len(nodes) - 1
    return replace(s, nodes=tuple(nodes), label="with a clone", lineage="")


def report() -> dict[str, Any]:
    """Return the result of Report.to_dict for these graphs."""
    shared = {
        "phase": "forward", "group": "g0", "ranks": 2, "dtype": "bfloat16", "module": "mlp", "source": LINE, "plan": PLAN,
        "bytes": 4096, "flops": 786432, "work": None, "options": ["pipelined"], "predicted": {}, "matmuls": [],
    }  # fmt: skip
    fast = {"predicted_us": {"none": 20.0, "pipelined": 12.5}, "choice": "pipelined", "best": "pipelined", "gain_us": 7.5,
            "matmul_us": 9.0, "communication_us": 11.0, "choice_reason": "saves 7.5"}  # fmt: skip
    slow = {"predicted_us": {"none": 6.0}, "choice": "none", "best": "none", "gain_us": 0.0, "matmul_us": 0.0,
            "communication_us": 6.0, "choice_reason": "nothing to hide it behind"}  # fmt: skip
    own = (
        ("forward.0", "all_gather_matmul", "pipelined", None, "pipelined saves 7.5", fast),
        ("forward.1", "matmul_reduce_scatter", "pipelined", None, "pipelined saves 7.5", fast),
        ("forward.2", "all_reduce", "none", "non_linear", "relu stands between <b>matmul</b> and all_reduce", slow),
    )
    shapes = {"input": "[64, 32]", "gathered": "[128, 32]", "matmul0": "[128, 32] @ [32, 48]"}
    sites = [
        {**shared, "id": i, "kind": k, "strategy": s, "reason": r, "detail": d, "shapes": shapes, **more}
        for i, k, s, r, d, more in own
    ]
    lanes = [
        {"what": "predicted, none", "us": 20.0, "steps": [["COMPUTE", "all_gather", 0, 11], ["COMPUTE", "matmul 0", 11, 20]]},
        {"what": "predicted, pipelined", "us": 12.5,
         "steps": [["COPY", "copy shard 0", 0, 6], ["COMPUTE", "matmul 0", 0, 5],
                   ["COMPUTE", "wait", 5, 7], ["COMPUTE", "matmul 1", 7, 12.5]]},
    ]  # fmt: skip
    summary = f"forward {PLAN}: 2 of 3 collectives overlapped"
    return {
        "version": 1, "plans": [PLAN], "profile": "h200", "summary": summary, "totals": "3 sites", "sites": sites,
        "lanes": {f"{PLAN}/forward.0": lanes}, "graphs": [graphs().to_dict()],
    }  # fmt: skip


def graphs() -> PlanGraphs:
    return PlanGraphs(PLAN, "forward", before(), after())
