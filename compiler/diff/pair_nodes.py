"""Pair the corresponding nodes of two snapshots.

    lineage      two snapshots of one graph object: the same name
    provenance   the same op and shapes, from the same line, module and node of Dynamo's graph, equally often in both graphs
    name         the same name, op and shapes
    structure    the same op over the same ops down to the inputs (a hash of each node and its inputs' hashes)
    neighbours   the same op at a paired input, then at a paired user: remaining nodes whose shape changed
    name again   the same name and op

Each step pairs nodes that no earlier step has paired, in linear time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable

from .snapshot import NodeShot, Snapshot

NONE = -1


class Matching:
    """The pairs. `to_b[i]`: the position in `b` of node i of `a`, or NONE; `to_a`: the inverse. `how[i]`: the pair's step."""

    def __init__(self, a: Snapshot, b: Snapshot) -> None:
        self.a, self.b = a, b
        self.to_b, self.to_a = [NONE] * len(a.nodes), [NONE] * len(b.nodes)
        self.how = [""] * len(a.nodes)
        self._step = ""

    def pair(self, i: int, j: int) -> None:
        """Pair node i of `a` with node j of `b`."""
        self.to_b[i], self.to_a[j], self.how[i] = j, i, self._step

    def by(self, step: str, key: Callable[[NodeShot], Hashable | None], even: bool) -> None:
        """Pair nodes of equal keys, in order. `even`: only if both graphs have equally many of them."""
        self.by_keys(step, list(map(key, self.a.nodes)), list(map(key, self.b.nodes)), even)

    def by_keys(self, step: str, keys_a: list[Hashable | None], keys_b: list[Hashable | None], even: bool) -> None:
        """Pair nodes of equal keys, given as lists."""
        self._step = step
        free_a, free_b = self._free(keys_a, self.to_b), self._free(keys_b, self.to_a)
        for key, places in free_a.items():
            others = free_b.get(key, [])
            if not even or len(places) == len(others):
                for i, j in zip(places, others, strict=False):
                    self.pair(i, j)

    @staticmethod
    def _free(keys: Iterable[Hashable | None], matched: list[int]) -> dict[Hashable, list[int]]:
        free: dict[Hashable, list[int]] = defaultdict(list)
        for place, key in enumerate(keys):
            if matched[place] == NONE and key is not None:
                free[key].append(place)
        return free

    def by_inputs(self) -> None:
        """Pair a reader of a paired node with the first free node of its target that reads the partner at that argument."""
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
        """Pair the nodes at the same argument of two paired nodes, from the outputs back, if they have the same target."""
        self._step = "neighbours"
        for j in range(len(self.b.nodes) - 1, -1, -1):
            if (i := self.to_a[j]) == NONE:
                continue
            for x, y in zip(self.a.nodes[i].inputs, self.b.nodes[j].inputs, strict=False):
                if self.to_b[x] == NONE and self.to_a[y] == NONE and _target(self.a.nodes[x]) == _target(self.b.nodes[y]):
                    self.pair(x, y)


def pair_nodes(a: Snapshot, b: Snapshot) -> Matching:
    """Pair each node of `a` with at most one node of `b`."""
    m = Matching(a, b)
    if a.lineage and a.lineage == b.lineage:
        m.by("lineage", lambda n: (n.name, n.op, n.target), even=True)
        return m
    m.by("provenance", _provenance, even=True)
    m.by("name", lambda n: (n.name, *_form(n)), even=True)
    m.by_keys("structure", structure_hashes(a), structure_hashes(b), even=False)
    m.by_inputs()
    m.by_users()
    m.by("name again", lambda n: (n.name, *_target(n)), even=True)
    return m


def _target(n: NodeShot) -> tuple[str, str]:
    """(op, target); the target of a placeholder is its name and is left out."""
    return (n.op, n.target if n.op != "placeholder" else "")


def _form(n: NodeShot) -> tuple[str, ...]:
    return (*_target(n), n.args, n.shape, n.dtype)


def _provenance(n: NodeShot) -> Hashable | None:
    """The source of a node; None if torch records none, as for inputs and the output."""
    return (*_form(n), n.module, n.source, n.origin) if n.source or n.origin else None


def structure_hashes(s: Snapshot) -> list[Hashable | None]:
    """Return a hash of each node: of its form and of its inputs' hashes. Inputs of the graph hash their names."""
    hashes: list[int] = []
    for n in s.nodes:
        own = (*_form(n), n.name if n.op == "placeholder" else "")
        hashes.append(hash((own, tuple(hashes[i] for i in n.inputs))))
    return list(hashes)
