"""The source of a graph node: the path of its nn.Module and the line of the user's code."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

from torch.fx import Node

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n\s+(.*)')
_LIBRARY = re.compile(r"[/\\]torch[/\\](distributed|nn|_dynamo|_tensor|utils|autograd)")


def module_path(node: Node) -> str:
    """Return the path of the innermost nn.Module. torch copies the stack of forward nodes to backward nodes."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    paths = [path for path, _ in stack.values()] if isinstance(stack, dict) else []
    return _plain(paths[-1]) if paths else ""


@lru_cache(maxsize=4096)
def _plain(path: str) -> str:
    path = re.sub(r"L\['self'\]\.?", "", path)
    path = re.sub(r"_modules\['(\w+)'\]", r"\1", path)
    return re.sub(r"\._orig_mod|_orig_mod\.", "", path).replace("['", ".").replace("']", "").lstrip(".")


def stable_names(nodes: Iterable[Node]) -> dict[Node, str]:
    """Return a name for each node that is the same on all ranks: "layers.0.wq#1".

    It is the module and the number of the node among the module's nodes in `nodes`. Names and positions of nodes in the
    graph may differ between ranks.
    """
    counts: Counter[str] = Counter()
    names = {}
    for node in nodes:
        module = module_path(node)
        names[node] = f"{module}#{counts[module]}"
        counts[module] += 1
    return names


def source_line(node: Node) -> str:
    """Return "file:line: code" of the innermost frame outside of torch."""
    return _line(node.stack_trace or "")


@lru_cache(maxsize=4096)
def _line(trace: str) -> str:
    frames = _FRAME.findall(trace)
    own = [f for f in frames if not _LIBRARY.search(f[0])] or frames
    if not own:
        return ""
    path, line, _, code = own[-1]
    return f"{path}:{line}: {code.strip()}"
