"""Inductor's options and hooks that change the order of a graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ub_overlap import _torch_compat as compat

_REORDERING = (
    "reorder_for_peak_memory", "enable_simple_overlap", "combo_kernels", "reorder_for_compute_comm_overlap",
    "reorder_for_reducing_graph_partitions",
)  # fmt: skip
"""Passes that move ops past each other, where the release has them."""
HOOKS = ("_pre_fusion_custom_pass", "_post_fusion_custom_pass")
"""Hooks for the nodes in front of and behind fusion."""

Pass = Callable[[list[Any]], list[Any]]


def ordering_options() -> dict[str, Any]:
    """Return the values of the options that `set_passes` changes."""
    known = compat.__getattr__("inductor_config").get_config_copy()
    return {name: known[name] for name in known if name.split(".")[-1] in (*_REORDERING, *HOOKS)}


def set_passes(before_fusion: Pass, after_fusion: Pass) -> None:
    """Let these passes order the graph that Inductor compiles now, behind a user's pass at their hook, and nothing else.

    The options must be among the patches of the compilation: Inductor restores those after each graph.
    """
    config = compat.__getattr__("inductor_config")
    own = dict(zip(HOOKS, (before_fusion, after_fusion), strict=True))
    for name, theirs in ordering_options().items():
        section, _, option = name.rpartition(".")
        value: Any = False
        if option in own:
            value = own[option] if theirs is None else functools.partial(_both, theirs, own[option])
        setattr(getattr(config, section) if section else config, option, value)


def restored_order() -> Any:
    """Return a context that restores the options that `set_passes` changes in it."""
    return compat.__getattr__("inductor_config").patch(ordering_options())


def _both(first: Pass, second: Pass, given: list[Any]) -> list[Any]:
    return second(first(given))
