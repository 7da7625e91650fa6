"""Casts to float8: 16-bit linears of a joint graph become scaled products, and what they gather travels as one byte."""

from .hoist.fold_scales import fold_scales
from .hoist.hoist_casts import HoistConfig, cast_before_gathers
from .insert.insert_casts import Fp8, insert_casts

__all__ = ["Fp8", "HoistConfig", "cast_before_gathers", "fold_scales", "insert_casts"]
