"""The settings of the pass that inserts float8 casts into one graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from torch.fx import Node

from ...cost.profile import Profile
from ...graph.dtensor_sizes import LocalSizes
from ..recipe import Recipe

LinearFilter = Callable[[str, tuple[int, int]], bool]
"""(module path, local (out, in) of the weight) -> whether the linear may be float8."""


@dataclass(frozen=True, slots=True)
class InsertConfig:
    """The requests of the options, and facts about the graph's inputs."""

    recipe: Recipe
    backward: bool
    """Whether the matmuls of gradients are float8 too."""
    filter: LinearFilter | None = None
    profile: Profile | None = None
    """The device's speeds, which predict whether a linear is faster in float8. None: float8 without a prediction."""
    state: str = ""
    """The name of the amax histories of delayed scaling."""
    cached_weights: Collection[Node] = ()
    """The graph inputs whose casts outlive calls (runtime/fp8/weight_cache/)."""
    verify: bool = False
    """Whether each matmul also runs in 16 bits and is compared (runtime/verify.py)."""
    uneven_inputs: Mapping[Node, LocalSizes] = field(default_factory=dict)
    """The graph inputs whose sizes differ between ranks."""
