"""What the backend changes in Inductor: lowerings of our ops, and workarounds for bugs."""

from .bug_patches import apply_bug_patches
from .op_lowerings import register_lowerings

__all__ = ["apply_bug_patches", "register_lowerings"]
