"""Casts to float8: 16-bit linears of a joint graph become scaled products, and what they gather travels as one byte."""

from .early import cast_before_gathers
from .insert import Fp8, insert

__all__ = ["Fp8", "cast_before_gathers", "insert"]
