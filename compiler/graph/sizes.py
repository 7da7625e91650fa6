"""Exact arithmetic on sizes: int if static, a sympy expression if dynamic.

No function adds a guard. A predicate that the expressions do not prove is False.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import sympy
import torch
from torch.fx import Graph

from ub_overlap import _torch_compat as compat

Size = Any
"""int or sympy.Expr. (Any to type checkers: sympy declares no types for its operators.)"""


def as_size(x: Any) -> Size:
    """Convert an int or SymInt to an int or an expression."""
    if isinstance(x, torch.SymInt):
        expr = x.node.expr
        return int(expr) if expr.is_Integer else expr
    return int(x)


def as_sizes(shape: Iterable[Any]) -> tuple[Size, ...]:
    """Convert ints and SymInts to ints and expressions."""
    return tuple(as_size(s) for s in shape)


def symbolic_sizes(values: Iterable[Any]) -> Iterator[torch.SymInt]:
    """Yield the symbolic values, and the symbolic sizes of values that are tensors."""
    for value in values:
        yield from (s for s in (value.shape if isinstance(value, torch.Tensor) else (value,)) if isinstance(s, torch.SymInt))


def size_symbols(graph: Graph) -> Iterator[tuple[sympy.Symbol, torch.SymInt]]:
    """Yield each symbol in the inputs of a graph and in their sizes, once, with its value."""
    seen: set[sympy.Symbol] = set()
    for x in symbolic_sizes(node.meta.get("val") for node in graph.find_nodes(op="placeholder")):
        for symbol in sorted(x.node.expr.free_symbols - seen, key=str):
            seen.add(symbol)
            yield symbol, compat.symint_of(symbol, x)


def is_positive(x: int | torch.SymInt) -> bool:
    """Return whether `x` is certainly above 0."""
    return (compat.range_of(x)[0] if isinstance(x, torch.SymInt) else x) > 0


def evaluate_size(x: Size, hints: Mapping[sympy.Symbol, int]) -> int | None:
    """Return a size as a number, with `hints` for its symbols. None unless all have values."""
    if isinstance(x, int):
        return x
    size = sympy.sympify(x)
    # Only its own symbols are replaced: graphs with experts have a few for each exchange of each layer.
    value = size.xreplace({symbol: sympy.Integer(hints[symbol]) for symbol in size.free_symbols if symbol in hints})
    return int(value) if value.is_Integer else None


def format_shape(shape: Iterable[Size]) -> str:
    """Return a shape as text: "[8, 64]", with symbols for dynamic sizes."""
    return "[" + ", ".join(map(str, shape)) + "]"


def numel(shape: Iterable[Size]) -> Size:
    """Return the number of elements of a tensor of `shape`."""
    elements: Size = 1
    for s in shape:
        elements = elements * s
    return elements


def divide(a: Size, b: Size) -> Size | None:
    """Return a / b if it is certainly whole, else None. 0 / b is 0; a / 0 is None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    if b == 0:
        return None
    q = sympy.cancel(sympy.sympify(a) / b)
    if q.as_numer_denom()[1] != 1:
        return None
    return int(q) if q.is_Integer else q


def is_same(a: Size, b: Size) -> bool:
    """Return whether a == b for certain."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return sympy.expand(sympy.sympify(a) - b) == 0


def is_same_shape(a: tuple[Size, ...], b: tuple[Size, ...]) -> bool:
    """Return whether two shapes are certainly the same."""
    return len(a) == len(b) and all(is_same(x, y) for x, y in zip(a, b, strict=True))


def squeezed(shape: tuple[Size, ...]) -> tuple[Size, ...]:
    """Return the shape without dims that are statically 1."""
    return tuple(s for s in shape if not (isinstance(s, int) and s == 1))


def about(x: int) -> int:
    """Round a size that may differ a little between ranks, so that all ranks compute with the same number.

    Rounds up to 64, then to an eighth of the size's octave. Sizes that divide evenly mostly stay as they are; the smaller last
    share is rounded up to them.
    """
    x = -(-x // 64) * 64
    step = max(64, 1 << max(0, x.bit_length() - 4))
    return -(-x // step) * step
