"""How a size is computed from sizes that a graph has already: one algebra, for what decides and for what emits.

inputs: x [s, 16], h [s*t, 8]         computed from them: s - 1, (s + 3)//4*4, s % 5, max(s - 5, 3), t
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import sympy
import torch
from torch.fx import Node

from ub_overlap import _torch_compat as compat

from .aten import aten, shape_of
from .sizes import Size, as_size

SizeSource = Any
"""int, a node that is the number, or (target, source, source). For `aten.sym_size.int`: (target, tensor, dim)."""

_TARGETS: dict[type, Callable[..., Any]] = {
    sympy.Add: operator.add,
    sympy.Mul: operator.mul,
    compat.size_functions.FloorDiv: operator.floordiv,
    compat.size_functions.CleanDiv: operator.floordiv,
    compat.size_functions.Mod: operator.mod,
    compat.size_functions.PythonMod: operator.mod,
    compat.size_functions.Max: torch.sym_max,
    compat.size_functions.Min: torch.sym_min,
}
"""Functions of sizes and the targets that compute them. Those of more than two parts are associative."""


class SizeSources:
    """Where sizes come from: `values` of a graph that are numbers, or tensors with sizes. It ignores other values."""

    def __init__(self, values: Sequence[Node]) -> None:
        self._values = values
        self._found: dict[Size, SizeSource | None] = {}

    def find(self, size: Size) -> SizeSource | None:
        """Return how `size` is computed, or None where the values do not determine it."""
        if isinstance(size, int):
            return size
        if size not in self._found:
            self._found[size] = _find(size, self._known)
        return self._found[size]

    @cached_property
    def _known(self) -> dict[Size, SizeSource]:
        """Return the sizes of the values, numbers first, and the symbols that follow from them."""
        known: dict[Size, SizeSource] = {}
        for node in self._values:
            if isinstance(value := node.meta.get("val"), torch.SymInt):
                known.setdefault(_key(as_size(value)), node)
        for node in self._values:
            if isinstance(node.meta.get("val"), torch.Tensor):
                for dim, size in enumerate(shape_of(node)):
                    if not isinstance(size, int):
                        known.setdefault(_key(size), (aten.sym_size.int, node, dim))
        while solved := dict(_solve(known)):
            known |= solved
        return known


def _key(size: Size) -> Size:
    """Return one form of sizes that are certainly the same (sizes.is_same)."""
    return size if isinstance(size, int | sympy.Symbol) else sympy.expand(size)


def _as_floor(size: Size) -> Size:
    """Return a rounded quotient of integers, such as math.ceil(n / 4), by floor division; other sizes as they are."""
    functions = compat.size_functions
    rounded = isinstance(size, functions.CeilToInt | functions.FloorToInt | functions.TruncToInt)
    if not rounded or not isinstance(size.args[0], functions.IntTrueDiv):
        return size
    above, below = size.args[0].args
    if isinstance(size, functions.CeilToInt):
        return -functions.FloorDiv(-above, below)
    rounds_down = isinstance(size, functions.FloorToInt) or (above.is_nonnegative and below.is_positive)
    return functions.FloorDiv(above, below) if rounds_down else size


def _find(size: Size, known: Mapping[Size, SizeSource]) -> SizeSource | None:
    size = _as_floor(size)
    if size.is_Integer:
        return int(size)
    if (source := known.get(_key(size))) is not None:
        return source
    if isinstance(size, sympy.Pow) and size.exp.is_Integer and int(size.exp) > 1:
        target, parts = operator.mul, (size.base,) * int(size.exp)
    elif type(size) in _TARGETS:
        target, parts = _TARGETS[type(size)], size.args
    else:
        return None
    sources = [_find(part, known) for part in parts]
    if None in sources:
        return None
    result, *others = sources
    for source in others:
        result = (target, result, source)
    return result


def _solve(known: Mapping[Size, SizeSource]) -> Iterator[tuple[sympy.Symbol, SizeSource]]:
    """Yield the unknown symbols that follow from one size, linear in them: s from s - 1, t from s*t with a known s."""
    for size, source in known.items():
        unknown = [] if isinstance(size, int | sympy.Symbol) else [s for s in size.free_symbols if s not in known]
        if len(unknown) != 1 or not size.is_polynomial(unknown[0]) or sympy.degree(size, unknown[0]) != 1:
            continue
        factor, rest = size.coeff(unknown[0], 1), size.coeff(unknown[0], 0)
        divisor, minus = _find(factor, known), _find(-rest, known)
        if not factor.is_positive or divisor is None or minus is None:  # a factor that may be 0 determines nothing
            continue
        product = source if minus == 0 else (operator.add, source, minus)
        yield unknown[0], product if divisor == 1 else (operator.floordiv, product, divisor)
