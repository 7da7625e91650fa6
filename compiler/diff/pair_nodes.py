"""Which node of one snapshot is which node of the other.

    lineage      of one graph object: a name is a node
    provenance   the same op on the same shapes, from the same line, module and node of Dynamo's graph, as often here as there
    name         the same name, op and shapes
    structure    the same op over the same ops down to the inputs (a hash of each node and its inputs' hashes)
    neighbours   the same op at a matched input, then at a matched user: what is left of nodes whose shape has changed
    name again   the same name and op

Every step looks at nodes that no step before it has matched, and is linear.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable

from .snapshot import NodeShot, Snapshot

NONE = -1


class Matching:
    """`to_b[i]`: the place in `b` of node i of `a`, or NONE; `to_a` the other way. `how[i]`: the step that found it."""

    def __init__(self, a: Snapshot, b: Snapshot) -> None:
        self.a, self.b = a, b
        self.to_b, self.to_a = [NONE] * len(a.nodes), [NONE] * len(b.nodes)
        self.how = [""] * len(a.nodes)
        self._step = ""

    def pair(self, i: int, j: int) -> None:
        self.to_b[i], self.to_a[j], self.how[i] = j, i, self._step

    def by(self, step: str, key: Callable[[NodeShot], Hashable | None], even: bool) -> None:
        """Pairs nodes of equal keys, in order. `even`: only where both sides have as many of them."""
        self.by_keys(step, list(map(key, self.a.nodes)), list(map(key, self.b.nodes)), even)

    def by_keys(self, step: str, here: list[Hashable | None], there: list[Hashable | None], even: bool) -> None:
        self._step = step
        mine, theirs = self._free(here, self.to_b), self._free(there, self.to_a)
        for key, places in mine.items():
            others = theirs.get(key, [])
            if not even or len(places) == len(others):
                for i, j in zip(places, others, strict=False):
                    self.pair(i, j)

    @staticmethod
    def _free(keys: Iterable[Hashable | None], matched: list[int]) -> dict[Hashable, list[int]]:
        found: dict[Hashable, list[int]] = defaultdict(list)
        for place, key in enumerate(keys):
            if matched[place] == NONE and key is not None:
                found[key].append(place)
        return found

    def by_inputs(self) -> None:
        """A node whose input is matched is the first free node of its target that reads the partner at the same argument."""
        self._step = "neighbours"
        readers: dict[Hashable, list[int]] = defaultdict(list)
        for i in range(len(self.a.nodes) - 1, -1, -1):  # the first reader is the last of its list
            node = self.a.nodes[i]
            if self.to_b[i] == NONE:
                for slot, source in enumerate(node.inputs):
                    readers[source, slot, node.op, node.target].append(i)
        for j, node in enumerate(self.b.nodes):
            for slot, source in enumerate(node.inputs if self.to_a[j] == NONE else ()):
                if (partner := self.to_a[source]) == NONE:
                    continue
                waiting = readers.get((partner, slot, node.op, node.target), [])
                while waiting and self.to_b[waiting[-1]] != NONE:
                    waiting.pop()
                if waiting:
                    self.pair(waiting.pop(), j)
                    break

    def by_users(self) -> None:
        """The same from the outputs back: what stands at the same argument of two matched nodes, if it has the same target."""
        self._step = "neighbours"
        for j in range(len(self.b.nodes) - 1, -1, -1):
            if (i := self.to_a[j]) == NONE:
                continue
            for x, y in zip(self.a.nodes[i].inputs, self.b.nodes[j].inputs, strict=False):
                if self.to_b[x] == NONE and self.to_a[y] == NONE and _target(self.a.nodes[x]) == _target(self.b.nodes[y]):
                    self.pair(x, y)


def match(a: Snapshot, b: Snapshot) -> Matching:
    """Every node of `a` and `b` matched once, or not at all."""
    m = Matching(a, b)
    if a.lineage and a.lineage == b.lineage:
        m.by("lineage", lambda n: (n.name, n.op, n.target), even=True)
        return m
    m.by("provenance", _provenance, even=True)
    m.by("name", lambda n: (n.name, *_form(n)), even=True)
    m.by_keys("structure", structure(a), structure(b), even=False)
    m.by_inputs()
    m.by_users()
    m.by("name again", lambda n: (n.name, *_target(n)), even=True)
    return m


def _target(n: NodeShot) -> tuple[str, str]:
    """A placeholder's target is its name."""
    return (n.op, n.target if n.op != "placeholder" else "")


def _form(n: NodeShot) -> tuple[str, ...]:
    return (*_target(n), n.args, n.shape, n.dtype)


def _provenance(n: NodeShot) -> Hashable | None:
    """None where torch says nothing of the node: inputs and the output."""
    return (*_form(n), n.module, n.source, n.origin) if n.source or n.origin else None


def structure(s: Snapshot) -> list[Hashable | None]:
    """A hash of each node: its form and its inputs' hashes. Inputs of the graph have their names."""
    known: list[int] = []
    for n in s.nodes:
        own = (*_form(n), n.name if n.op == "placeholder" else "")
        known.append(hash((own, tuple(known[i] for i in n.inputs))))
    return list(known)
