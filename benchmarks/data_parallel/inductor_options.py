"""Inductor's own overlap of collectives: the options of each rival, of those that the running torch has.

inductor_overlap   overlap scheduling with bucketing, as torchtitan's graph_trainer sets it; in a torch without it, the
                   reordering of collectives
inductor_symm      the same, then low-contention collectives: copies of symmetric memory in place of NCCL's kernels

Low-contention collectives replace only all_gathers and reduce_scatters of at least 16 MiB per rank that have a matmul to hide
behind and no collective of another group next to them. `count_low_contention` counts what a step runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Set
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from ub_overlap import _torch_compat as compat

_ATTENTION = "aten._scaled_dot_product_"
INDUCTOR_OVERLAP, INDUCTOR_SYMM = "inductor_overlap", "inductor_symm"
_DISTRIBUTED = "aten_distributed_optimizations."
_SCHEDULING = {_DISTRIBUTED + "enable_overlap_scheduling": True}
_REORDERING = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": [
        "reorder_communication_preserving_peak_memory", "sink_waits_iterative", "reorder_communication_preserving_peak_memory",
    ],
}  # fmt: skip
_LOW_CONTENTION = {**_SCHEDULING, _DISTRIBUTED + "enable_low_contention_collectives": True}
INDUCTOR_RIVALS: dict[str, tuple[dict[str, Any], ...]] = {
    INDUCTOR_OVERLAP: (_SCHEDULING, _REORDERING),
    INDUCTOR_SYMM: (_LOW_CONTENTION,),
}
"""By variant the sets of options that it may use, best first."""
WITH_SCHEDULING: dict[str, Any] = {
    _DISTRIBUTED + "collective_bucketing": True,  # None, the default, does not bucket
    _DISTRIBUTED + "insert_overlap_deps": True,
    "allow_buffer_reuse": False,
    "reorder_for_peak_memory": False,
    "reorder_for_compute_comm_overlap": False,
}
"""What torchtitan's graph_trainer sets with overlap scheduling (jit_backend.py)."""


def known_options() -> Set[str]:
    """Return the names of Inductor's options in the running torch."""
    return compat.inductor_option_names()


def inductor_options(name: str, compiler: str, is_cuda: bool) -> dict[str, Any]:
    """Return the options of torch.compile for a rival. RuntimeError where it cannot run."""
    if compiler != "inductor":
        raise RuntimeError(f"{name} needs --compiler inductor, not {compiler}")
    known = known_options()
    options = next((options for options in INDUCTOR_RIVALS[name] if options.keys() <= known), None)
    if options is None:
        raise RuntimeError(
            f"torch {torch.__version__} has no option {', '.join(sorted(INDUCTOR_RIVALS[name][0].keys() - known))}"
        )
    if name == INDUCTOR_SYMM and not is_cuda:
        raise RuntimeError("low-contention collectives need CUDA")
    if _SCHEDULING.keys() <= options.keys():
        options = {**options, **{key: value for key, value in WITH_SCHEDULING.items() if key in known}}
    return options


def count_grouped_heads(registry: dict[Any, Any] = flop_registry) -> None:
    """Let torch count the flops of attention whose keys and values have fewer heads than the queries, in this process.

    The flop counter of torch 2.11 raises AssertionError for it; later releases count it as if heads were repeated. Overlap
    scheduling raises too, as it logs the flops of each attention, also where `custom_runtime_estimation` gives a time. The
    schedule does not depend on the count: the scheduler runs the attention and takes its time.
    """
    for op, formula in [*registry.items()]:
        if str(op).startswith(_ATTENTION) and not _counts_grouped_heads(op, formula):
            registry[op] = functools.partial(_with_repeated_heads, _query_place(op), formula)


def _counts_grouped_heads(op: Any, formula: Callable[..., Any]) -> bool:
    two_heads, one_head = (1, 2, 1, 1), (1, 1, 1, 1)
    try:
        formula(*[two_heads] * (1 + _query_place(op)), one_head, one_head)
    except AssertionError:
        return False
    return True


def _query_place(op: Any) -> int:
    """Return the place of the queries in the arguments of an attention. Keys and values follow."""
    return 1 if str(op).endswith("_backward") else 0  # behind the gradient of the output


def _with_repeated_heads(place: int, formula: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `formula` of an attention whose keys and values have the heads of its queries."""
    shapes = [a.shape if isinstance(a, torch.Tensor) else a for a in args]
    heads = shapes[place][1]
    shapes[place + 1 : place + 3] = [(s[0], heads, *s[2:]) for s in shapes[place + 1 : place + 3]]
    return formula(*shapes, **kwargs)


def count_low_contention(step: Callable[[], Any], prefix: str = "symm_mem::_low_contention_") -> int:
    """Run a step under the profiler, and return how many low-contention collectives it runs. RuntimeError for none.

    `prefix`: of the names of these ops.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    count = sum(event.count for event in profile.key_averages() if event.key.startswith(prefix))
    if not count:
        raise RuntimeError("torch replaced no collective by a low-contention one: small ones, or nothing to hide behind")
    return count
