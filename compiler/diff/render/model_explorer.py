"""A diff for Google's model-explorer: a JSON collection of both graphs, with nodes by module and differences in color.

pip install ai-edge-model-explorer; model-explorer diff.json
"""

from __future__ import annotations

from typing import Any

from ..edits import Diff
from ..pair_nodes import NONE
from ..snapshot import NodeShot, Snapshot

_COLORS = {
    "removed": {"backgroundColor": "#fdecec", "borderColor": "#a11d1d"},
    "added": {"backgroundColor": "#e6f6ec", "borderColor": "#0c6b3f"},
    "changed": {"backgroundColor": "#fff6db", "borderColor": "#9a6b00"},
}


def collection(diffs: list[Diff]) -> dict[str, Any]:
    """Return one collection with the two graphs of each diff."""
    graphs = []
    for d in diffs:
        gone = {i: "removed" for i, j in enumerate(d.matching.to_b) if j == NONE}
        came = {j: "added" for j, i in enumerate(d.matching.to_a) if i == NONE}
        gone |= dict.fromkeys(d.changes, "changed")
        came |= {c.after: "changed" for c in d.changes.values()}
        name = f"{d.phase} {d.plan}".strip() or "graph"
        graphs.append(_graph(f"{name}: {d.a.label or 'before'}", d.a, gone))
        graphs.append(_graph(f"{name}: {d.b.label or 'after'}", d.b, came))
    return {"label": "ub_overlap", "graphs": graphs}


def _graph(name: str, s: Snapshot, marked: dict[int, str]) -> dict[str, Any]:
    return {"id": name, "nodes": [_node(s, place, n, marked.get(place)) for place, n in enumerate(s.nodes)]}


def _node(s: Snapshot, place: int, n: NodeShot, mark: str | None) -> dict[str, Any]:
    facts = {"target": n.target, "arguments": n.args, "module": n.module, "source": n.source, "site": n.site, "diff": mark}
    edges = [
        {"sourceNodeId": str(i), "sourceNodeOutputId": "0", "targetNodeInputId": str(slot)} for slot, i in enumerate(n.inputs)
    ]
    value = f"{n.dtype} {n.shape}".strip()
    out: dict[str, Any] = {
        "id": str(place),
        "label": n.name,
        "namespace": n.module.replace(".", "/"),
        "attrs": [{"key": key, "value": text} for key, text in facts.items() if text],
        "incomingEdges": edges,
    }
    if value:
        out["outputsMetadata"] = [{"id": "0", "attrs": [{"key": "tensor_shape", "value": value}]}]
    return {**out, "style": _COLORS[mark]} if mark else out
