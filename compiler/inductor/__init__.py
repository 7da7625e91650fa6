"""What the backend changes in Inductor: lowerings of our ops, their times, the order of kernels, and workarounds for bugs."""

from .bug_patches import apply_bug_patches
from .cxx_compiler import require_cxx_compiler
from .kernel_order import keep_order
from .op_lowerings import register_lowerings
from .order_options import ordering_options
from .runtime_estimates import estimate_own_ops

__all__ = [
    "apply_bug_patches",
    "estimate_own_ops",
    "keep_order",
    "ordering_options",
    "register_lowerings",
    "require_cxx_compiler",
]
