"""Inductor's own overlap of collectives: the options of each rival, of those that the running torch has.

inductor_overlap   overlap scheduling, with its bucketing; in a torch without it, the reordering of collectives
inductor_symm      the same, then low-contention collectives: copies of symmetric memory in place of NCCL's kernels
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch

from ub_overlap import _torch_compat as compat

INDUCTOR_OVERLAP, INDUCTOR_SYMM = "inductor_overlap", "inductor_symm"
_SCHEDULING = {"aten_distributed_optimizations.enable_overlap_scheduling": True}
_REORDERING = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": [
        "reorder_communication_preserving_peak_memory", "sink_waits_iterative", "reorder_communication_preserving_peak_memory",
    ],
}  # fmt: skip
_LOW_CONTENTION = {**_SCHEDULING, "aten_distributed_optimizations.enable_low_contention_collectives": True}
INDUCTOR_RIVALS: dict[str, tuple[dict[str, Any], ...]] = {
    INDUCTOR_OVERLAP: (_SCHEDULING, _REORDERING),
    INDUCTOR_SYMM: (_LOW_CONTENTION,),
}
"""By variant the sets of options that it may use, best first."""


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
    return options
