"""A diff for graphviz: each edit is a cluster; removed nodes are red, added ones green, their neighbors gray."""

from __future__ import annotations

import json

from ..edits import Diff, Edit
from ..pair_nodes import NONE
from ..snapshot import NodeShot, Snapshot

_STYLES = {
    "removed": 'style=filled, fillcolor="#fdecec", color="#a11d1d"',
    "added": 'style=filled, fillcolor="#e6f6ec", color="#0c6b3f"',
    "changed": 'style=filled, fillcolor="#fff6db", color="#9a6b00"',
    "kept": 'color="#8f9bab", fontcolor="#5d6b7e"',
}


def dot(diff: Diff, site: str | None = None) -> str:
    """Return the edits with their neighboring nodes. `site`: only the edit of that site.

    Nodes of both graphs are drawn once. An edge that only the first graph has is dashed.
    """
    edits = [e for e in diff.edits if site in (None, e.site)]
    out = ["digraph diff {", "  rankdir=TB; node [shape=box, fontname=monospace, fontsize=10]; compound=true;"]
    drawn: dict[str, str] = {}
    edges: dict[tuple[str, str], str] = {}
    for number, edit in enumerate(edits):
        title = f"{edit.site}: {edit.title}" if edit.site else edit.title
        out.append(f"  subgraph cluster_{number} {{ label={json.dumps(title)}; color=gray; fontname=sans;")
        for name, node, look in _members(diff, edit):
            drawn[name] = look
            out.append(f"    {_node(name, node, look)}")
        out.append("  }")
        _edges(diff, edit, edges)
    for name in dict.fromkeys(n for pair in edges for n in pair):
        if name not in drawn:
            out.append(f"  {_node(name, _of(diff, name), 'kept')}")
    for (source, target), style in edges.items():
        out.append(f"  {source} -> {target}{style};")
    return "\n".join([*out, "}"])


def _members(diff: Diff, edit: Edit) -> list[tuple[str, NodeShot, str]]:
    gone = [(f"a{i}", diff.a.nodes[i], "removed") for i in edit.removed]
    came = [(f"b{j}", diff.b.nodes[j], "added") for j in edit.added]
    return [*gone, *came, *((f"b{c.after}", diff.b.nodes[c.after], "changed") for c in edit.changed)]


def _edges(diff: Diff, edit: Edit, edges: dict[tuple[str, str], str]) -> None:
    """Add the inputs and the readers of the edit's nodes."""
    to_b = diff.matching.to_b

    def before(i: int) -> str:
        return f"a{i}" if to_b[i] == NONE else f"b{to_b[i]}"

    def around(s: Snapshot, k: int) -> list[tuple[int, int]]:
        return [(p, k) for p in dict.fromkeys(s.nodes[k].inputs)] + [(k, u) for u in s.users[k]]

    for j in (*edit.added, *(c.after for c in edit.changed)):
        edges.update({(f"b{p}", f"b{q}"): "" for p, q in around(diff.b, j)})
    for i in edit.removed:
        for p, q in around(diff.a, i):
            edges.setdefault((before(p), before(q)), "" if to_b[p] == to_b[q] == NONE else " [style=dashed]")


def _of(diff: Diff, name: str) -> NodeShot:
    return (diff.a if name[0] == "a" else diff.b).nodes[int(name[1:])]


def _node(name: str, node: NodeShot, look: str) -> str:
    about = f"{node.name}\n{node.target if node.op == 'call_function' else node.op}\n{node.shape} {node.dtype}".rstrip()
    return f"{name} [label={json.dumps(about)}, {_STYLES[look]}];"
