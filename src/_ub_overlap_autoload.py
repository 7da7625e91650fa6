"""What torch calls at the end of its own import (entry point "torch.backends"): `UB_OVERLAP_ENABLE=1 python train.py`.

A module of its own: a process that does not ask for it imports nothing of ub_overlap.
"""

import os


def autoload() -> None:
    """Enable what `ub_overlap.enable` enables, as the variable UB_OVERLAP_ENABLE says."""
    text = os.environ.get("UB_OVERLAP_ENABLE", "").strip()
    if text.lower() not in ("", "0", "false", "no", "off"):
        from ub_overlap._enable import enable_by_variable

        enable_by_variable(text)
