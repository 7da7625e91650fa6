"""A benchmark of one process, without a group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ub_overlap.tools.rank_process import RankProcess


@dataclass
class OneProcess(RankProcess):
    """This process alone, for the metadata of a measurement."""

    device: torch.device
    rank: int = 0
    ranks: int = 1

    def gather(self, value: Any) -> list[Any]:
        """Return the value."""
        return [value]
