"""The kernels that are bound by memory: local copies and sums, and the driver's copy, alone and concurrent with a matmul."""
