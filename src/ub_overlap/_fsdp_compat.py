"""The only file that reads private attributes of torch.distributed.fsdp.fully_shard and of c10d's reduce ops.

Names of private modules are in `_torch_compat.py`. `tests/test_torch_compat.py` runs every function on the installed torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def param_groups(module: Any) -> list[Any]:
    """Return the parameter groups of an FSDPModule. Each communicates alone. torch 2.11 has one at most."""
    state = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)
    return [group for group in (several if several is not None else [state._fsdp_param_group]) if group is not None]


def comms(param_group: Any) -> tuple[Any, Any]:
    """Return the all_gather and the reduce_scatter of a parameter group, as its module's set_custom_* set them."""
    return param_group._all_gather_comm, param_group._reduce_scatter_comm


def set_comms(param_group: Any, all_gather: Any, reduce_scatter: Any) -> None:
    """Set both. The public set_custom_* refuse modules with several parameter groups."""
    param_group._all_gather_comm, param_group._reduce_scatter_comm = all_gather, reduce_scatter


def gather_group(param_group: Any) -> Any:
    """Return the process group of the next all_gather: a smaller one if parameters were resharded to fewer ranks."""
    return param_group._all_gather_process_group


def at_first_forward(call: Callable[[Any], None]) -> Callable[[], None]:
    """Call `call(root)` for the root module of each model of fully_shard before it first runs. Return what ends that."""
    from ub_overlap import _torch_compat as compat

    state_type = compat.FSDPState
    plain = state_type._lazy_init

    def lazy_init(state: Any) -> None:
        is_first = state._is_root is None
        plain(state)
        if is_first and state._is_root and type(state) is state_type:  # torch's replicate has a subclass
            call(state._modules[0])

    def end() -> None:
        state_type._lazy_init = plain

    state_type._lazy_init = lazy_init
    return end


def unsharded_parameters(param_group: Any) -> list[Any]:
    """Return the whole parameters of a group, to which backward passes gradients. Empty before the first gather."""
    return [p._unsharded_param for p in param_group.fsdp_params if hasattr(p, "_unsharded_param")]


def accumulate_in_reduce_dtype(param_group: Any) -> None:
    """Add gradients of whole parameters to those of the reduce dtype, as a backward without synchronization ends with.

    torch 2.15 accumulates in that dtype by itself.
    """
    for p in param_group.fsdp_params:
        if hasattr(p, "_unsharded_param") and hasattr(p, "to_accumulated_grad_if_needed"):
            p.accumulate_unsharded_grad_if_needed()
            p.to_accumulated_grad_if_needed()


def premul_factor(op: Any) -> float | None:
    """Return the factor of a reduce op PREMUL_SUM, None for other ops and for a factor on the device."""
    from torch.distributed import ReduceOp

    if not isinstance(op, ReduceOp) or op != ReduceOp.PREMUL_SUM:
        return None
    state: Any = op.__getstate__()
    return state[1] if isinstance(state[1], float) else None
