"""How a size is computed from sizes that a graph has already: one algebra, for what decides and for what emits.

inputs: x [s, 16], h [s*t, 8]         computed from them: s - 1, (s + 3)//4*4, s % 5, max(s - 5, 3), ceil(1.25*s/8), t
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import sympy
import torch
from torch.fx import Node

from .aten import aten, shape_of
from .sizes import Size, as_size

SizeSource = Any
"""A number, a node that is one, or (target, source, ...). For `aten.sym_size.int`: (target, tensor, dim)."""

_TARGETS: dict[str, Callable[..., Any]] = {
    "Add": operator.add, "Mul": operator.mul, "Max": torch.sym_max, "Min": torch.sym_min, "Abs": operator.abs,
    "FloorDiv": operator.floordiv, "CleanDiv": operator.floordiv, "Mod": operator.mod, "PythonMod": operator.mod,
    "IntTrueDiv": operator.truediv, "FloatTrueDiv": operator.truediv, "ToFloat": torch.sym_float,
    "CeilToInt": math.ceil, "FloorToInt": math.floor, "TruncToInt": math.trunc, "RoundToInt": round,
    "Pow": operator.pow, "PowByNatural": operator.pow, "FloatPow": operator.pow, "OpaqueUnaryFn_sqrt": torch.sym_sqrt,
    "BitwiseFn_bitwise_and": operator.and_, "BitwiseFn_bitwise_or": operator.or_, "BitwiseFn_bitwise_xor": operator.xor,
    "Equality": operator.eq, "Unequality": operator.ne, "StrictGreaterThan": operator.gt, "GreaterThan": operator.ge,
    "StrictLessThan": operator.lt, "LessThan": operator.le, "And": operator.and_, "Or": operator.or_, "Not": torch.sym_not,
    "Piecewise": torch.sym_ite,
}  # fmt: skip
"""Functions of sizes, by the names that sympy and torch give them, and what computes them."""
_ASSOCIATIVE = frozenset({"Add", "Mul", "Max", "Min", "And", "Or"})


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
    return sympy.expand(size) if isinstance(size, sympy.Expr) and not size.is_Symbol else size


def _find(size: Any, known: Mapping[Size, SizeSource]) -> SizeSource | None:
    if isinstance(size, sympy.ITE):
        size = size.to_nnf()
    if getattr(size, "is_number", False) and not size.is_Function:
        return int(size) if size.is_Integer else float(size) if size.is_Float else None
    if (source := known.get(_key(size))) is not None:
        return source
    name = type(size).__name__
    if name not in _TARGETS or (name == "Pow" and not (size.exp.is_Integer and size.exp > 1)):
        return None
    sources = [_find(part, known) for part in _parts(size)]
    if any(source is None for source in sources):
        return None
    if name not in _ASSOCIATIVE:
        return (_TARGETS[name], *sources)
    return functools.reduce(lambda first, second: (_TARGETS[name], first, second), sources)


def _parts(size: Any) -> tuple[Any, ...]:
    """Return the arguments of the target of a function. Of several conditions, the first with what holds without it."""
    parts: tuple[Any, ...] = tuple(size.args)
    if isinstance(size, sympy.Piecewise):
        (value, condition), *others = parts
        return condition, value, others[0].expr if others[0].cond is sympy.true else sympy.Piecewise(*others)
    if isinstance(size, sympy.core.relational.Relational):  # s/2 > t/3 is 3*s > 2*t: without fractions, it is exact
        factor = math.lcm(*(number.q for number in size.atoms(sympy.Rational)))
        return tuple(sympy.expand(factor * part) for part in parts)
    return parts


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
