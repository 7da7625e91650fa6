"""The difference of two snapshots: nodes that went, came or changed, grouped into edits.

An edit is what one site did ("all_gather + wait + 3 matmuls -> all_gather_matmul"), or, where nodes belong to no site, nodes
that hang together: neighbours, and what came at the arguments where something went.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tabulate import tabulate

from .pair_nodes import NONE, Matching, match
from .snapshot import NodeShot, Snapshot, line_number, line_of, short, summary

FIELDS = ("target", "args", "shape", "dtype", "stride")


@dataclass(frozen=True, slots=True)
class Change:
    """A node that is in both graphs and not the same. `fields`: (what, before, after)."""

    before: int
    after: int
    fields: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class Edit:
    """Nodes that differ for one reason. `removed`: places in the first snapshot; `added`: in the second."""

    site: str
    removed: tuple[int, ...]
    added: tuple[int, ...]
    changed: tuple[Change, ...]
    title: str
    module: str
    source: str

    @property
    def size(self) -> int:
        return len(self.removed) + len(self.added) + len(self.changed)


class Diff:
    """`a` against `b`. `edits` in graph order; empty exactly where both graphs compute the same in the same form. str() is a
    table of them."""

    def __init__(self, a: Snapshot, b: Snapshot, plan: str = "") -> None:
        self.a, self.b, self.plan = a, b, plan
        self.matching: Matching = match(a, b)
        self.changes = {c.before: c for c in _changes(self.matching)}
        self.edits = _grouped(self.matching, self.changes)

    @property
    def phase(self) -> str:
        return self.b.phase or self.a.phase

    @property
    def same(self) -> bool:
        return not self.edits

    @cached_property
    def by_site(self) -> dict[str, Edit]:
        return {e.site: e for e in self.edits if e.site}

    def first(self) -> str:
        """The first node that differs, on both sides, with its line; "" where none does."""
        if not self.edits:
            return ""
        here = min((i for e in self.edits for i in (*e.removed, *(c.before for c in e.changed))), default=NONE)
        there = min((j for e in self.edits for j in (*e.added, *(c.after for c in e.changed))), default=NONE)
        if here != NONE and here in self.changes:
            there = self.changes[here].after
        lines = []
        for label, snapshot, place in ((self.a.label, self.a, here), (self.b.label, self.b, there)):
            said = (
                f"{line_of(snapshot, snapshot.nodes[place])}  {_where(snapshot, place)}"
                if place != NONE
                else "no node of its own"
            )
            lines.append(f"{label}: {said}")
        return "\n".join(lines)

    def counts(self) -> str:
        """ "3 edits: 7 nodes removed, 4 added, 1 changed"."""
        if self.same:
            return f"no difference ({len(self.a.nodes)} nodes)"
        n = len(self.edits)
        removed, added = sum(len(e.removed) for e in self.edits), sum(len(e.added) for e in self.edits)
        changed = sum(len(e.changed) for e in self.edits)
        text = f"{n} edit{'s' if n > 1 else ''}: {removed} nodes removed, {added} added"
        return text + (f", {changed} changed" if changed else "")

    def to_dict(self) -> dict[str, Any]:
        return {
            "phase": self.phase,
            "plan": self.plan,
            "before": {"label": self.a.label, "nodes": len(self.a.nodes)},
            "after": {"label": self.b.label, "nodes": len(self.b.nodes)},
            "edits": [
                {
                    "site": e.site, "title": e.title, "module": e.module, "source": e.source,
                    "removed": [line_of(self.a, self.a.nodes[i]) for i in e.removed],
                    "added": [line_of(self.b, self.b.nodes[j]) for j in e.added],
                    "changed": [
                        {"node": self.b.nodes[c.after].name, **{f: [old, new] for f, old, new in c.fields}} for c in e.changed
                    ],
                }
                for e in self.edits
            ],
        }  # fmt: skip

    def __str__(self) -> str:
        """A row an edit."""
        name = f"{self.phase} {self.plan}".strip()
        heading = f"{name or 'graph'}: {self.a.label or 'before'} -> {self.b.label or 'after'}: {self.counts()}"
        if self.same:
            return heading
        found = [
            {
                "site": e.site or "-",
                "edit": e.title,
                "nodes": f"-{len(e.removed)} +{len(e.added)}" + (f" ~{len(e.changed)}" if e.changed else ""),
                "module": e.module,
                "line": line_number(e.source),
            }
            for e in self.edits
        ]
        return heading + "\n" + tabulate(found, headers="keys", tablefmt="simple", disable_numparse=True)


def _where(s: Snapshot, place: int) -> str:
    """The node's line; an input of the graph has none, but who reads it has."""
    if s.nodes[place].source:
        return f"at {s.nodes[place].source}"
    readers = (s.nodes[u].source for u in s.users[place])
    return next((f"read at {source}" for source in readers if source), "at an unknown line")


def _changes(m: Matching) -> list[Change]:
    found = []
    for i, j in enumerate(m.to_b):
        if j == NONE:
            continue
        x, y = m.a.nodes[i], m.b.nodes[j]
        different = [(f, getattr(x, f), getattr(y, f)) for f in FIELDS if getattr(x, f) != getattr(y, f)]
        if x.op == "placeholder":
            different = [d for d in different if d[0] != "target"]
        # Where a node went or came, that node is the difference, and not its readers.
        moved = [(p, q) for p, q in zip(x.inputs, y.inputs, strict=False) if m.to_b[p] not in (q, NONE) and m.to_a[q] != NONE]
        if moved:
            before, after = (", ".join(s.nodes[k[n]].name for k in moved) for n, s in enumerate((m.a, m.b)))
            different.append(("inputs", before, after))
        if different:
            found.append(Change(i, j, tuple(different)))
    return found


class _Groups:
    """Union-find over nodes of both sides: ("a", i) is i, ("b", j) is len(a) + j."""

    def __init__(self, size: int, sites: list[str]) -> None:
        self._up = list(range(size))
        self._site = sites

    def root(self, x: int) -> int:
        while self._up[x] != x:
            self._up[x] = self._up[self._up[x]]
            x = self._up[x]
        return x

    def join(self, x: int, y: int) -> None:
        """Joins both groups, unless they are of two sites."""
        x, y = self.root(x), self.root(y)
        if x == y or (self._site[x] and self._site[y] and self._site[x] != self._site[y]):
            return
        self._up[max(x, y)] = min(x, y)
        self._site[min(x, y)] = self._site[x] or self._site[y]


def _grouped(m: Matching, changes: dict[int, Change]) -> list[Edit]:
    a, b, offset = m.a, m.b, len(m.a.nodes)
    changed_to = {c.after: c.before for c in changes.values()}

    def mine(i: int) -> int:
        return i if m.to_b[i] == NONE or i in changes else NONE

    def theirs(j: int) -> int:
        return offset + j if m.to_a[j] == NONE else changed_to.get(j, NONE)

    gone = [n.site if m.to_b[i] == NONE else "" for i, n in enumerate(a.nodes)]
    came = [n.site if m.to_a[j] == NONE else "" for j, n in enumerate(b.nodes)]
    groups = _Groups(offset + len(b.nodes), gone + came)
    homes: dict[str, int] = {}
    for x, site in enumerate(gone + came):
        if site:
            groups.join(homes.setdefault(site, x), x)
    for nodes, place in ((a.nodes, mine), (b.nodes, theirs)):
        for k, node in enumerate(nodes):
            if (x := place(k)) != NONE:
                for source in node.inputs:
                    if (y := place(source)) != NONE:
                        groups.join(x, y)
    for i, j in enumerate(m.to_b):
        if j != NONE:
            for p, q in zip(a.nodes[i].inputs, b.nodes[j].inputs, strict=False):
                if m.to_b[p] == NONE and m.to_a[q] == NONE:
                    groups.join(p, offset + q)
    found: dict[int, tuple[list[int], list[int], list[Change]]] = {}
    for i in range(offset):
        if m.to_b[i] == NONE:
            found.setdefault(groups.root(i), ([], [], []))[0].append(i)
        elif i in changes:
            found.setdefault(groups.root(i), ([], [], []))[2].append(changes[i])
    for j in range(len(b.nodes)):
        if m.to_a[j] == NONE:
            found.setdefault(groups.root(offset + j), ([], [], []))[1].append(j)
    return sorted((_edit(m, *parts) for parts in found.values()), key=lambda e: _position(m, e))


def _edit(m: Matching, removed: list[int], added: list[int], changed: list[Change]) -> Edit:
    gone, came = [m.a.nodes[i] for i in removed], [m.b.nodes[j] for j in added]
    if gone or came:
        title = f"{summary(gone) or 'nothing'} -> {summary(came) or 'nothing'}"
    else:
        what = Counter(f for c in changed for f, _, _ in c.fields)
        title = f"{summary(m.b.nodes[c.after] for c in changed)}: other {', '.join(what)}"
    told = [*came, *gone, *(m.b.nodes[c.after] for c in changed)]
    told = [
        n for n in told if short(n) in ("matmul", "scaled_matmul")
    ] or told  # what a user thinks of when he looks for a site
    return Edit(
        site=next((n.site for n in [*came, *gone] if n.site), ""),
        removed=tuple(removed),
        added=tuple(added),
        changed=tuple(changed),
        title=title,
        module=_most(told, "module"),
        source=_most(told, "source"),
    )


def _most(nodes: list[NodeShot], field: str) -> str:
    """What most of the nodes say; "" where none says anything."""
    said = Counter(text for n in nodes if (text := getattr(n, field)))
    return said.most_common(1)[0][0] if said else ""


def _position(m: Matching, e: Edit) -> tuple[int, int]:
    """Where it begins: by the place of its first node in either graph."""
    here = [*e.removed, *(c.before for c in e.changed)]
    there = [*e.added, *(c.after for c in e.changed)]
    return (min(here, default=1 << 60) if here else min(there, default=0), min(there, default=0))
