"""Casts to float8: 16-bit linears of a joint graph become scaled products, and what they gather travels as one byte."""

from .early import Early, cast_before_gathers
from .fold import fold_scales
from .insert import Fp8, insert

__all__ = ["Early", "Fp8", "cast_before_gathers", "fold_scales", "insert"]
