"""A graph as plain data, for diffs, pages and errors. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

VERSION = 1


class NodeShot(NamedTuple):
    """One node, as a tuple, because a graph has thousands. Fields that nodes share are text, which JSON stores once."""

    name: str
    inputs: tuple[int, ...] = ()
    """Positions of the nodes that it reads, in the order of its arguments."""
    op: str = "call_function"
    target: str = ""
    args: str = ""
    """Its arguments, with "%" for each node. Process groups are numbered in graph order, which is the same on all ranks."""
    shape: str = ""
    """The shape: "[64, 32]"; of several results "[64, 32] [64]"; with symbols for dynamic sizes."""
    dtype: str = ""
    stride: str = ""
    module: str = ""
    source: str = ""
    """The line of the user's code: "file:line: code"."""
    origin: str = ""
    """The node of Dynamo's graph that it was derived from; "" if torch does not record it (backward)."""
    site: str = ""
    """The site of the node ("forward.0"), as a member that is replaced or as part of the replacement."""


_SHARED = NodeShot._fields[2:]


@dataclass(frozen=True)
class Snapshot:
    """The nodes of a graph, in its order.

    Two snapshots of one lineage are of the same graph object, in which names are stable and never reused.
    """

    nodes: tuple[NodeShot, ...]
    phase: str = ""
    label: str = ""
    lineage: str = ""
    torch: str = ""
    extra: dict[str, str] = field(default_factory=dict)

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """Positions of the readers of each node, each once."""
        readers: list[list[int]] = [[] for _ in self.nodes]
        for place, node in enumerate(self.nodes):
            for i in dict.fromkeys(node.inputs):
                readers[i].append(place)
        return tuple(map(tuple, readers))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: one row per node, [name, inputs, indices of texts]."""
        texts: dict[str, int] = {}
        rows = [[n.name, n.inputs, *[texts.setdefault(text, len(texts)) for text in n[2:]]] for n in self.nodes]
        return {
            "version": VERSION, "phase": self.phase, "label": self.label, "lineage": self.lineage, "torch": self.torch,
            "columns": ["name", "inputs", *_SHARED], "texts": list(texts), "nodes": rows,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Snapshot:
        """Read the result of `to_dict`. ValueError for other data or another version."""
        if d.get("version") != VERSION:
            raise ValueError(f"a graph of version {VERSION}, not {d.get('version')!r}")
        texts, columns = d["texts"], d["columns"][2:]
        nodes = []
        for name, inputs, *numbers in _checked_rows(d["nodes"], len(columns), len(texts)):
            shared = {column: texts[number] for column, number in zip(columns, numbers, strict=True) if column in _SHARED}
            nodes.append(NodeShot(name=name, inputs=tuple(inputs), **shared))
        return cls(tuple(nodes), d["phase"], d["label"], d["lineage"], d["torch"])


def _checked_rows(rows: Any, columns: int, texts: int) -> Iterator[list[Any]]:
    """Yield the rows of `Snapshot.to_dict`. ValueError for the first that is not one. A node reads earlier nodes only."""
    for place, row in enumerate(rows):
        is_row = isinstance(row, list) and len(row) == 2 + columns and isinstance(row[0], str)
        if not is_row or not isinstance(row[1], list | tuple) or not all(type(n) is int and 0 <= n < texts for n in row[2:]):
            raise ValueError(f"in nodes[{place}] a row of name, inputs and {columns} indices of {texts} texts")
        if not all(type(n) is int and 0 <= n < place for n in row[1]):
            raise ValueError(f"in nodes[{place}] inputs that are nodes before it")
        yield row


def format_node(snapshot: Snapshot, node: NodeShot) -> str:
    """Return a node as text: "mm_1 = aten.mm.default(x, permute_1) [64, 32] bfloat16"."""
    names = iter(snapshot.nodes[i].name for i in node.inputs)
    args = "".join(next(names, "%") if c == "%" else c for c in node.args)
    value = " ".join(filter(None, (node.shape, node.dtype)))
    text = f"{node.name} = {node.target}({args})" if node.op == "call_function" else f"{node.name} = {node.op}({args})"
    return f"{text} {value}".rstrip()


_PLAIN = {
    "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter", "wait_tensor": "wait",
    "mm": "matmul", "addmm": "matmul", "bmm": "matmul",
    "_scaled_mm": "scaled_matmul", "_unsafe_view": "view", "convert_element_type": "cast",
}  # fmt: skip
_MINOR = {
    "view", "reshape", "permute", "clone", "getitem", "t", "transpose", "expand", "squeeze", "unsqueeze", "alias", "detach",
    "split", "split_with_sizes", "chunk", "slice", "sym_size", "cat", "cast", "contiguous", "output", "placeholder",
}  # fmt: skip


def short_op(node: NodeShot) -> str:
    """Return the op as one word: "aten.mm.default" -> "matmul"."""
    if node.op != "call_function":
        return node.op
    parts = node.target.split(".")
    name = parts[-2] if len(parts) > 1 else parts[-1]
    return _PLAIN.get(name, name)


def summarize_ops(nodes: Iterable[NodeShot]) -> str:
    """Count ops as text: "all_gather + wait + 3 matmuls". Views and the like are named only if there is nothing else."""
    counts: dict[str, int] = {}
    for node in nodes:
        counts[short_op(node)] = counts.get(short_op(node), 0) + 1
    main = {name: count for name, count in counts.items() if name not in _MINOR}
    return " + ".join(
        name if count == 1 else f"{count} {name}{'' if name.endswith('s') else 's'}" for name, count in (main or counts).items()
    )
