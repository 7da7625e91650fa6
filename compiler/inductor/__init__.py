"""What the backend changes in Inductor: lowerings of our ops, their times, and workarounds for bugs."""

from .bug_patches import apply_bug_patches
from .op_lowerings import register_lowerings
from .runtime_estimates import estimate_own_ops

__all__ = ["apply_bug_patches", "estimate_own_ops", "register_lowerings"]
