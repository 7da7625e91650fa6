"""Casts to float8: 16-bit linears of a joint graph become scaled products, and what they gather travels as one byte."""
