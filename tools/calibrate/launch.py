"""The ranks that torchrun started. Imports no torch, so that a missing torchrun is an error at once."""

from __future__ import annotations

import os

from ub_overlap.runtime.errors import OptionError


def ranks_of_torchrun() -> tuple[int, int]:
    """Return this process's rank and the number of ranks. OptionError outside of torchrun, or with one rank."""
    ranks = int(os.environ.get("WORLD_SIZE", "0"))
    if "RANK" not in os.environ or ranks < 2:
        raise OptionError(
            "calibration needs the ranks of a group",
            got=f"{ranks or 1} rank",
            expected="2 or more",
            fix="torchrun --nproc-per-node N -m ub_overlap calibrate",
        )
    return int(os.environ["RANK"]), ranks
