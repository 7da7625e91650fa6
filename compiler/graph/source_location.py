"""The source of a graph node: the path of its nn.Module and the line of the user's code."""

from __future__ import annotations

import linecache
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable
from functools import cache, lru_cache
from pathlib import Path
from types import FrameType

import torch
from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat
from ub_overlap._dynamo_compat import input_source

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n\s+(.*)')
_LIBRARIES = (
    "torch", "torchao", "accelerate", "einops", "ub_overlap", "transformers/distributed", "transformers/integrations",
    "transformers/utils", "transformers/modeling_layers.py", "torchtitan/distributed", "megatron/core/tensor_parallel",
)  # fmt: skip
"""Packages, folders and files that run between a user's line and a collective. Model code of a library is not among them."""
_LIBRARY = re.compile(rf"/(?:site|dist)-packages/(?:{'|'.join(map(re.escape, _LIBRARIES))})(?:/|$)")

_NO_MODULE = re.compile(r"\.__closure__\[\d+\]\.cell_contents|\.\w+\.__self__")
"""Steps between a function and a module: a variable of its closure, and the module whose method it is."""
_PART = re.compile(r"\['([^']*)'\]|\[(\w+)\]|(\w+)")
_WRAPPERS = {
    "_modules", "_parameters", "_buffers", "__dict__", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module",
}  # fmt: skip
"""Parts of a path that are no names of modules and parameters."""
_ROOTS = (["self"], ["fn"], ["args", "0"])
"""Variables of the compiled module: of its forward, of torch's wrapper of a module such as nn.Sequential, of a decorator."""


_WHOLE = re.compile(r"^[LG]\['(\w+)'\]")
"""The variable that a source begins with."""


def module_path(node: Node) -> str:
    """Return the path of the innermost nn.Module, as named_modules() of the compiled module gives it.

    In a compiled function the name of the variable that holds the module comes first: "model.layers.0.wq". torch copies the
    stack of forward nodes to backward nodes.
    """
    return _module_paths(_innermost_source(node))[0]


def module_paths(node: Node) -> tuple[str, ...]:
    """Return the paths by which a user may name the innermost nn.Module: `module_path`, and the same without a variable."""
    return tuple(path for path in dict.fromkeys(_module_paths(_innermost_source(node))) if path)


def _innermost_source(node: Node) -> str:
    """Return Dynamo's source of the module, "L['self'].layers.0.wq", or the name that torchtitan's graph_trainer annotates."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if isinstance(stack, dict) and stack:
        return next(path for path, _ in reversed(stack.values()))
    annotated = (node.meta.get("custom") or {}).get("module_fqn", "")
    return annotated if isinstance(annotated, str) else ""


@lru_cache(maxsize=4096)
def _module_paths(source: str) -> tuple[str, str]:
    """Return (path, path without the variable) of a module that Dynamo found at `source`."""
    parts = [next(filter(None, groups)) for groups in _PART.findall(_NO_MODULE.sub("", source)) if any(groups)]
    is_variable = len(parts) > 1 and parts[0] in ("L", "G")
    parts = [part for part in parts[is_variable:] if part not in _WRAPPERS]
    for root in _ROOTS:
        if is_variable and parts[: len(root)] == root:
            return (".".join(parts[len(root) :]),) * 2
    return ".".join(parts), ".".join(parts[is_variable:])


def input_names(graph: Graph) -> list[str]:
    """Return the names of the inputs of Dynamo's graph: paths of parameters and buffers, and names of arguments."""
    names = []
    for node in graph.find_nodes(op="placeholder"):
        source = input_source(node)
        names.append(_module_paths(source)[1] or _WHOLE.sub(r"\1", source) or node.name)
    return names


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
    """Return "file:line: code" of the innermost frame of the user's code; "" where the node has none.

    A layer of an nn.Sequential that is compiled by itself has none: only torch's code is traced.
    """
    return _line(node.stack_trace or "")


@lru_cache(maxsize=4096)
def _line(trace: str) -> str:
    for path, line, _, code in reversed(_FRAME.findall(trace)):
        if not _is_library(path):
            return f"{path}:{line}: {code.strip()}"
    return ""


def calling_line() -> str:
    """Return "file:line: code" of the user's code that runs now: at compile time, the call of the compiled module."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not _is_library(path) and not path.startswith(("<eval_with_key>", "<frozen")):
            return f"{path}:{frame.f_lineno}: {linecache.getline(path, frame.f_lineno).strip()}"
        frame = frame.f_back
    return ""


@lru_cache(maxsize=4096)
def _is_library(path: str) -> bool:
    """Return whether a file belongs to Python, to torch, to this package, or to a library's wrappers of parallel modules."""
    if "-packages" not in path:
        return path.startswith(_folders())
    return path.startswith(_folders()[1:]) or _LIBRARY.search(path.replace(os.sep, "/")) is not None


@cache
def _folders() -> tuple[str, ...]:
    """The folders of Python, which may hold all packages, and of torch and this package, which may lie elsewhere."""
    import ub_overlap.runtime

    files = (os.__file__, torch.__file__, compat.__file__, ub_overlap.runtime.__file__, str(Path(__file__).parent))
    return tuple(str(Path(file or "").parent) + os.sep for file in files)
