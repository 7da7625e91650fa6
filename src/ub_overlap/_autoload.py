"""What torch calls at the end of its own import, by the entry point "torch.backends": `UB_OVERLAP_ENABLE=1 python train.py`."""

from __future__ import annotations

import os


def autoload() -> None:
    """Enable what `ub_overlap.enable` enables where the variable UB_OVERLAP_ENABLE says so. Else import nothing."""
    text = os.environ.get("UB_OVERLAP_ENABLE", "").strip()
    if text not in ("", "0"):
        from ub_overlap.compiler.enable import enable_by_variable

        enable_by_variable(text)
