"""The difference of two snapshots: removed, added and changed nodes, grouped into edits.

An edit is the change of one site ("all_gather + wait + 3 matmuls -> all_gather_matmul"). Nodes without a site form an edit
if they are neighbors, or if added nodes replace removed ones as arguments.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..text.short_line import short_line
from ..text.table import render_table
from .pair_nodes import NONE, Matching, pair_nodes
from .snapshot import NodeShot, Snapshot, format_node, short_op, summarize_ops

FIELDS = ("target", "args", "shape", "dtype", "stride")


@dataclass(frozen=True, slots=True)
class Change:
    """A node of both graphs that is not the same. `fields`: (name, before, after)."""

    before: int
    after: int
    fields: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class Edit:
    """Nodes that differ for one reason. `removed`: positions in the first snapshot; `added`: in the second."""

    site: str
    removed: tuple[int, ...]
    added: tuple[int, ...]
    changed: tuple[Change, ...]
    title: str
    module: str
    source: str

    @property
    def size(self) -> int:
        """The number of nodes."""
        return len(self.removed) + len(self.added) + len(self.changed)


class Diff:
    """The difference of snapshots `a` and `b`. str() is a table of the edits.

    `edits`: in graph order; empty if and only if both graphs have the same nodes.
    """

    def __init__(self, a: Snapshot, b: Snapshot, plan: str = "") -> None:
        self.a, self.b, self.plan = a, b, plan
        self.matching: Matching = pair_nodes(a, b)
        self.changes = {c.before: c for c in _changes(self.matching)}
        self.edits = _group_edits(self.matching, self.changes)

    @property
    def phase(self) -> str:
        """The phase of the graphs."""
        return self.b.phase or self.a.phase

    @property
    def same(self) -> bool:
        """Whether the graphs do not differ."""
        return not self.edits

    @cached_property
    def by_site(self) -> dict[str, Edit]:
        """The edits of sites, by site id."""
        return {e.site: e for e in self.edits if e.site}

    def first(self) -> str:
        """Return the first node that differs, in both graphs, with its line; "" if none does."""
        if not self.edits:
            return ""
        first_a = min((i for e in self.edits for i in (*e.removed, *(c.before for c in e.changed))), default=NONE)
        first_b = min((j for e in self.edits for j in (*e.added, *(c.after for c in e.changed))), default=NONE)
        if first_a != NONE and first_a in self.changes:
            first_b = self.changes[first_a].after
        lines = []
        for snapshot, place in ((self.a, first_a), (self.b, first_b)):
            text = (
                f"{format_node(snapshot, snapshot.nodes[place])}  {_where(snapshot, place)}"
                if place != NONE
                else "no node of its own"
            )
            lines.append(f"{snapshot.label}: {text}")
        return "\n".join(lines)

    def counts(self) -> str:
        """Return the counts as text: "3 edits: 7 nodes removed, 4 added, 1 changed"."""
        if self.same:
            return f"no difference ({len(self.a.nodes)} nodes)"
        n = len(self.edits)
        removed, added = sum(len(e.removed) for e in self.edits), sum(len(e.added) for e in self.edits)
        changed = sum(len(e.changed) for e in self.edits)
        text = f"{n} edit{'s' if n > 1 else ''}: {removed} nodes removed, {added} added"
        return text + (f", {changed} changed" if changed else "")

    def to_dict(self) -> dict[str, Any]:
        """Return the edits as plain data."""
        return {
            "phase": self.phase,
            "plan": self.plan,
            "before": {"label": self.a.label, "nodes": len(self.a.nodes)},
            "after": {"label": self.b.label, "nodes": len(self.b.nodes)},
            "edits": [
                {
                    "site": e.site, "title": e.title, "module": e.module, "source": e.source,
                    "removed": [format_node(self.a, self.a.nodes[i]) for i in e.removed],
                    "added": [format_node(self.b, self.b.nodes[j]) for j in e.added],
                    "changed": [
                        {"node": self.b.nodes[c.after].name, **{f: [old, new] for f, old, new in c.fields}} for c in e.changed
                    ],
                }
                for e in self.edits
            ],
        }  # fmt: skip

    def __str__(self) -> str:
        """Return a table with one row per edit."""
        return self.table()

    def table(self, width: int | None = None) -> str:
        """Return a table with one row per edit. `width`: the limit of a line; columns that do not fit are left out."""
        if self.same:
            return self.heading()
        return self.heading() + "\n" + render_table(self.rows(), width=width, optional=("line", "module", "nodes"))

    def heading(self) -> str:
        """Return the graph, both sides and the number of edits in a line."""
        name = f"{self.phase} {self.plan}".strip()
        return f"{name or 'graph'}: {self.a.label or 'before'} -> {self.b.label or 'after'}: {self.counts()}"

    def rows(self) -> list[dict[str, str]]:
        """Return the rows of `table`: one dict per edit."""
        return [
            {
                "site": e.site or "-",
                "edit": e.title,
                "nodes": f"-{len(e.removed)} +{len(e.added)}" + (f" ~{len(e.changed)}" if e.changed else ""),
                "module": e.module,
                "line": short_line(e.source),
            }
            for e in self.edits
        ]

    def _repr_html_(self) -> str:
        """Return the edits for a notebook."""
        from .render.notebook import Section, render_notebook

        return render_notebook([Section(self.heading(), self.rows())])


def _where(s: Snapshot, place: int) -> str:
    """The line of a node. An input of the graph has none, so its first reader's is used."""
    if s.nodes[place].source:
        return f"at {s.nodes[place].source}"
    readers = (s.nodes[u].source for u in s.users[place])
    return next((f"read at {source}" for source in readers if source), "at an unknown line")


def _changes(m: Matching) -> list[Change]:
    """The paired nodes that differ."""
    changes = []
    for i, j in enumerate(m.to_b):
        if j == NONE:
            continue
        x, y = m.a.nodes[i], m.b.nodes[j]
        different = [(f, getattr(x, f), getattr(y, f)) for f in FIELDS if getattr(x, f) != getattr(y, f)]
        if x.op == "placeholder":
            different = [d for d in different if d[0] != "target"]
        # A removed or added input is a separate difference, not one of its readers.
        moved = [(p, q) for p, q in zip(x.inputs, y.inputs, strict=False) if m.to_b[p] not in (q, NONE) and m.to_a[q] != NONE]
        if moved:
            before, after = (", ".join(s.nodes[k[n]].name for k in moved) for n, s in enumerate((m.a, m.b)))
            different.append(("inputs", before, after))
        if different:
            changes.append(Change(i, j, tuple(different)))
    return changes


class _Groups:
    """Union-find over the nodes of both graphs: node i of a is i, node j of b is len(a) + j."""

    def __init__(self, size: int, sites: list[str]) -> None:
        self._up = list(range(size))
        self._site = sites

    def root(self, x: int) -> int:
        """Return the group of node `x`."""
        while self._up[x] != x:
            self._up[x] = self._up[self._up[x]]
            x = self._up[x]
        return x

    def join(self, x: int, y: int) -> None:
        """Join two groups, unless they belong to different sites."""
        x, y = self.root(x), self.root(y)
        if x == y or (self._site[x] and self._site[y] and self._site[x] != self._site[y]):
            return
        self._up[max(x, y)] = min(x, y)
        self._site[min(x, y)] = self._site[x] or self._site[y]


def _group_edits(m: Matching, changes: dict[int, Change]) -> list[Edit]:
    a, b, offset = m.a, m.b, len(m.a.nodes)
    changed_to = {c.after: c.before for c in changes.values()}

    def index_of_a(i: int) -> int:
        return i if m.to_b[i] == NONE or i in changes else NONE

    def index_of_b(j: int) -> int:
        return offset + j if m.to_a[j] == NONE else changed_to.get(j, NONE)

    gone = [n.site if m.to_b[i] == NONE else "" for i, n in enumerate(a.nodes)]
    came = [n.site if m.to_a[j] == NONE else "" for j, n in enumerate(b.nodes)]
    groups = _Groups(offset + len(b.nodes), gone + came)
    homes: dict[str, int] = {}
    for x, site in enumerate(gone + came):
        if site:
            groups.join(homes.setdefault(site, x), x)
    for nodes, index_of in ((a.nodes, index_of_a), (b.nodes, index_of_b)):
        for k, node in enumerate(nodes):
            if (x := index_of(k)) != NONE:
                for source in node.inputs:
                    if (y := index_of(source)) != NONE:
                        groups.join(x, y)
    for i, j in enumerate(m.to_b):
        if j != NONE:
            for p, q in zip(a.nodes[i].inputs, b.nodes[j].inputs, strict=False):
                if m.to_b[p] == NONE and m.to_a[q] == NONE:
                    groups.join(p, offset + q)
    parts_of: dict[int, tuple[list[int], list[int], list[Change]]] = {}
    for i in range(offset):
        if m.to_b[i] == NONE:
            parts_of.setdefault(groups.root(i), ([], [], []))[0].append(i)
        elif i in changes:
            parts_of.setdefault(groups.root(i), ([], [], []))[2].append(changes[i])
    for j in range(len(b.nodes)):
        if m.to_a[j] == NONE:
            parts_of.setdefault(groups.root(offset + j), ([], [], []))[1].append(j)
    return sorted((_edit(m, *parts) for parts in parts_of.values()), key=lambda e: _position(m, e))


def _edit(m: Matching, removed: list[int], added: list[int], changed: list[Change]) -> Edit:
    gone, came = [m.a.nodes[i] for i in removed], [m.b.nodes[j] for j in added]
    if gone or came:
        title = f"{summarize_ops(gone) or 'nothing'} -> {summarize_ops(came) or 'nothing'}"
    else:
        what = Counter(f for c in changed for f, _, _ in c.fields)
        title = f"{summarize_ops(m.b.nodes[c.after] for c in changed)}: other {', '.join(what)}"
    shown = [*came, *gone, *(m.b.nodes[c.after] for c in changed)]
    shown = [n for n in shown if short_op(n) in ("matmul", "scaled_matmul")] or shown  # users look for the matmul
    return Edit(
        site=next((n.site for n in [*came, *gone] if n.site), ""),
        removed=tuple(removed),
        added=tuple(added),
        changed=tuple(changed),
        title=title,
        module=_most_common(shown, "module"),
        source=_most_common(shown, "source"),
    )


def _most_common(nodes: list[NodeShot], field: str) -> str:
    """The most common non-empty value of a field; "" if all are empty."""
    counts = Counter(text for n in nodes if (text := getattr(n, field)))
    return counts.most_common(1)[0][0] if counts else ""


def _position(m: Matching, e: Edit) -> tuple[int, int]:
    """The sort key of an edit: the position of its first node in either graph."""
    in_a = [*e.removed, *(c.before for c in e.changed)]
    in_b = [*e.added, *(c.after for c in e.changed)]
    return (min(in_a) if in_a else min(in_b, default=0), min(in_b, default=0))
