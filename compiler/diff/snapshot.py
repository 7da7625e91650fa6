"""A graph as plain data, taken at one moment: what diffs, pages and errors are made of. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

VERSION = 1


class NodeShot(NamedTuple):
    """One node; a tuple, because a graph has thousands. Everything that more than one can share is text, so that JSON keeps it
    once."""

    name: str
    inputs: tuple[int, ...] = ()
    """Places of the nodes that it reads, in the order of its arguments."""
    op: str = "call_function"
    target: str = ""
    args: str = ""
    """Its arguments, "%" for each node; process groups by their order in the graph, which is the same on all ranks."""
    shape: str = ""
    """ "[64, 32]"; several results "[64, 32] [64]"; symbols where dynamic."""
    dtype: str = ""
    stride: str = ""
    module: str = ""
    source: str = ""
    """ "file:line: code"."""
    origin: str = ""
    """The node of Dynamo's graph that it was made from, "" where torch does not tell (backward)."""
    site: str = ""
    """The site it belongs to ("forward.0"): as a member that is to be replaced, or as part of what replaced it."""


_SHARED = NodeShot._fields[2:]


@dataclass(frozen=True)
class Snapshot:
    """The nodes of a graph, in its order. Two snapshots of one lineage are of the same graph object, in which names are kept
    and never used twice."""

    nodes: tuple[NodeShot, ...]
    phase: str = ""
    label: str = ""
    lineage: str = ""
    torch: str = ""
    extra: dict[str, str] = field(default_factory=dict)

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """Places of the readers of each node, each once."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for place, node in enumerate(self.nodes):
            for i in dict.fromkeys(node.inputs):
                found[i].append(place)
        return tuple(map(tuple, found))

    def to_dict(self) -> dict[str, Any]:
        """JSON: a row a node, [name, inputs, and numbers of texts]."""
        texts: dict[str, int] = {}
        rows = [[n.name, n.inputs, *[texts.setdefault(text, len(texts)) for text in n[2:]]] for n in self.nodes]
        return {
            "version": VERSION, "phase": self.phase, "label": self.label, "lineage": self.lineage, "torch": self.torch,
            "columns": ["name", "inputs", *_SHARED], "texts": list(texts), "nodes": rows,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Snapshot:
        """ValueError for what is not one, or was made by another version."""
        if d.get("version") != VERSION or not isinstance(d.get("nodes"), list):
            raise ValueError(f"snapshot: got version {d.get('version')!r}, expected {VERSION}")
        texts, columns = d["texts"], d["columns"][2:]
        nodes = []
        for name, inputs, *numbers in d["nodes"]:
            if inputs and not 0 <= min(inputs) <= max(inputs) < len(d["nodes"]):
                raise ValueError(f"snapshot: node {name} reads a node that is not there")
            shared = {column: texts[number] for column, number in zip(columns, numbers, strict=True) if column in _SHARED}
            nodes.append(NodeShot(name=name, inputs=tuple(inputs), **shared))
        return cls(tuple(nodes), d["phase"], d["label"], d["lineage"], d["torch"])


def line_number(source: str) -> str:
    """ "/home/me/model.py:12: code" -> "model.py:12"."""
    return source.partition(": ")[0].rpartition("/")[2]


def line_of(snapshot: Snapshot, node: NodeShot) -> str:
    """ "mm_1 = aten.mm.default(x, permute_1) [64, 32] bfloat16"."""
    names = iter(snapshot.nodes[i].name for i in node.inputs)
    said = "".join(next(names, "%") if c == "%" else c for c in node.args)
    value = " ".join(filter(None, (node.shape, node.dtype)))
    text = f"{node.name} = {node.target}({said})" if node.op == "call_function" else f"{node.name} = {node.op}({said})"
    return f"{text} {value}".rstrip()


_PLAIN = {
    "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter", "wait_tensor": "wait",
    "mm": "matmul", "addmm": "matmul", "bmm": "matmul",
    "_scaled_mm": "scaled_matmul", "_unsafe_view": "view", "convert_element_type": "cast",
}  # fmt: skip
_QUIET = {
    "view", "reshape", "permute", "clone", "getitem", "t", "transpose", "expand", "squeeze", "unsqueeze", "alias", "detach",
    "split", "split_with_sizes", "chunk", "slice", "sym_size", "cat", "cast", "contiguous", "output", "placeholder",
}  # fmt: skip


def short(node: NodeShot) -> str:
    """The op in one word: "aten.mm.default" -> "matmul"."""
    if node.op != "call_function":
        return node.op
    parts = node.target.split(".")
    name = parts[-2] if len(parts) > 1 else parts[-1]
    return _PLAIN.get(name, name)


def summary(nodes: Iterable[NodeShot]) -> str:
    """ "all_gather + wait + 3 matmuls"; views and the like only where there is nothing else."""
    counts: dict[str, int] = {}
    for node in nodes:
        counts[short(node)] = counts.get(short(node), 0) + 1
    loud = {name: count for name, count in counts.items() if name not in _QUIET}
    return " + ".join(
        name if count == 1 else f"{count} {name}{'' if name.endswith('s') else 's'}" for name, count in (loud or counts).items()
    )
