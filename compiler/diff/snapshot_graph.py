"""FX graph -> Snapshot, a copy as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat
from ub_overlap._aot_compat import graph_input
from ub_overlap.runtime.site_id import SiteId

from ..graph.emitter import SITE
from ..graph.source_location import module_path, source_line
from .snapshot import NodeShot, Snapshot

_LONGEST = 400  # characters of a node's arguments: constants may be long


class NodeTexts:
    """The texts of nodes, cached from one snapshot of a graph to the next.

    Value, module, line and origin of a node do not change. Process groups are numbered by first use, as their names differ
    between ranks. `input_names`: of the inputs of Dynamo's graph, in order; () where they are not known.
    """

    def __init__(self, input_names: Sequence[str] = ()) -> None:
        self.text = _Text()
        self._input_names = input_names
        self._fixed: dict[Node, tuple[str, str, str, str, str, str, str, str]] = {}

    def fixed(self, node: Node) -> tuple[str, str, str, str, str, str, str, str]:
        """Return op, target, shape, dtype, stride, module, source, origin."""
        texts = self._fixed.get(node)
        if texts is None:
            value = self.text.value(node.meta.get("val") if node.op != "output" else None)
            place = (module_path(node), source_line(node), _origin(node))
            texts = self._fixed[node] = (node.op, self.text.target(node.target), *value, *place)
        return texts

    def args(self, node: Node) -> tuple[str, list[Node]]:
        """Return the arguments as `_Text.args`; of a placeholder the name of its parameter or input."""
        if node.op != "placeholder":
            return self.text.args(node)
        index = graph_input(node)
        is_known = index is not None and index < len(self._input_names)
        return (self._input_names[index].replace("%", "") if is_known else "", [])


def snapshot_graph(
    graph: Graph,
    phase: str,
    label: str,
    sites: Mapping[str, str] | None = None,
    lineage: str = "",
    texts: NodeTexts | None = None,
) -> Snapshot:
    """Return a copy of `graph` as it is now.

    `sites`: node name -> site id, for nodes without one of their own. `lineage` and `texts`: shared by the snapshots of one
    graph object, and by no others.
    """
    places = {node: place for place, node in enumerate(graph.nodes)}
    texts, marked = texts or NodeTexts(), sites or {}
    shots = []
    for node in graph.nodes:
        op, target, shape, dtype, stride, module, source, origin = texts.fixed(node)
        args, inputs = texts.args(node)
        site = node.meta.get(SITE, "")
        mark = SiteId.parse(site).name if site else marked.get(node.name, "")
        read = tuple([places[i] for i in inputs])
        shots.append(NodeShot(node.name, read, op, target, args, shape, dtype, stride, module, source, origin, mark))
    return Snapshot(tuple(shots), phase, label, lineage, str(torch.__version__))


def _origin(node: Node) -> str:
    """The name of the first node that this one was derived from."""
    before = node.meta.get("from_node")
    while before:
        last = before[-1]
        deeper = getattr(last, "from_node", None)
        if not deeper:
            return str(getattr(last, "name", ""))
        before = deeper
    return ""


class _Text:
    """The texts of arguments and values."""

    def __init__(self) -> None:
        self._inputs: list[Node] = []
        self._groups: dict[str, str] = {}
        self._targets: dict[Any, str] = {}
        self._names: dict[Any, tuple[str, ...]] = {}

    def target(self, target: Any) -> str:
        text = self._targets.get(target) if target.__hash__ else None
        if text is None:
            text = target if isinstance(target, str) else str(target)
            if not isinstance(target, str | compat.OpOverload):
                text = getattr(target, "__name__", text)
            self._targets[target] = text
        return text

    def args(self, node: Node) -> tuple[str, list[Node]]:
        """Return the arguments, with "%" for each node, and these nodes, as often and in the same order."""
        self._inputs = inputs = []
        names = self._schema(node.target)
        parts = [
            self._arg(value, names[i] if i < len(names) else "") for i, value in enumerate(node.args)
        ]  # fmt: skip
        parts += [f"{key}={self._arg(value, key if names else '')}" for key, value in node.kwargs.items()]
        text = ", ".join(parts)
        if len(text) > _LONGEST:
            text = text[:_LONGEST] + "..." + "%" * text[_LONGEST:].count("%")
        return text, inputs

    def _schema(self, target: Any) -> tuple[str, ...]:
        """The argument names of collectives and of ub_overlap's ops; () for others."""
        if not isinstance(target, compat.OpOverload) or target.namespace not in ("_c10d_functional", "ub_overlap"):
            return ()
        if target not in self._names:
            self._names[target] = tuple(a.name for a in target._schema.arguments)
        return self._names[target]

    def _arg(self, value: Any, name: str) -> str:
        if isinstance(value, Node):
            self._inputs.append(value)
            return "%"
        if isinstance(value, str):
            if name in ("group_name", "group", "tag"):
                return self._groups.setdefault(value, f"g{len(self._groups)}")
            text = repr(SiteId.parse(value).name if name == "site" else value)
        elif isinstance(value, list | tuple):
            return "[" + ", ".join(self._arg(v, "") for v in value) + "]"
        elif isinstance(value, dict):
            return "{" + ", ".join(f"{k}: {self._arg(v, '')}" for k, v in value.items()) + "}"
        elif isinstance(value, slice):
            return ":".join(self._arg(v, "") for v in (value.start, value.stop, value.step))
        else:
            text = str(value).removeprefix("torch.")
        return text.replace("%", "")[:_LONGEST]

    def value(self, val: Any) -> tuple[str, str, str]:
        """Return (shape, dtype, stride) of a node's value."""
        if isinstance(val, torch.Tensor):
            dtype = str(val.dtype).removeprefix("torch.")
            stride = str(list(val.stride())) if val.layout is torch.strided else str(val.layout)
            return str(list(val.shape)), dtype, stride
        if isinstance(val, list | tuple):
            parts = [self.value(v) for v in val]
            return " ".join(p[0] for p in parts), parts[0][1] if parts else "", " ".join(p[2] for p in parts)
        return ("", type(val).__name__, "") if val is not None else ("", "", "")
