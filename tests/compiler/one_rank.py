"""Collectives of a graph on one rank, by stand-ins."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Interpreter

from tests.compiler.dags import c10d


class OneRank(Interpreter):
    """Runs a graph with stand-ins for collectives, which move and add up rows as they do."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        x = args[0]
        if target is c10d.all_gather_into_tensor.default:
            return torch.cat([x * (r + 1) for r in range(args[1])])
        if target is c10d.reduce_scatter_tensor.default:
            return sum(part * (r + 1) for r, part in enumerate(x.chunk(args[2])))
        if target is c10d.all_to_all_single.default:
            assert sum(args[2]) == len(x)
            return torch.cat([part * (r + 2) for r, part in enumerate(x.split(args[2]))])[: sum(args[1])]
        if target is c10d.all_reduce.default:
            return x * 3
        return x if target is c10d.wait_tensor.default else super().call_function(target, args, kwargs)
