"""Gated persistent matmuls against pieces of cuBLAS, on one GPU."""
