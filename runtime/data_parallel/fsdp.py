"""fully_shard (FSDP2) over our transport: `install(model)` replaces the collectives of its modules.

FSDP2 cannot be traced, so no compiler pass sees its collectives. It has a plug for them instead: an object for the all_gather
and one for the reduce_scatter of each module.

    copy-in (FSDP's kernel) -> all_gather -> copy-out (FSDP's kernel) -> parameters
    copy-in of gradients -> reduce_scatter -> (all_reduce of HSDP, torch's own) -> gradients

FSDP calls them in streams of its own, in the order of its program, which is the same on all ranks. A call issues all its work
in the current stream, so FSDP's events order it with everything else, and any number of gathers may be in flight. The result
of a gather is landing memory (landing_slots.py), so nothing is staged.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from ub_overlap import _fsdp_compat
from ub_overlap import _torch_compat as compat

from .. import errors
from .asynchronous import SideStreams
from .eager_collectives import REDUCED_DTYPES, gather_into, reduce_scatter_into
from .landing_slots import LandingSlots
from .served_groups import ServedGroups


class Installation:
    """The collectives that `install` has replaced."""

    def __init__(self, groups: ServedGroups) -> None:
        self._groups, self._streams = groups, SideStreams()
        self._replaced: list[tuple[Any, Any, Any]] = []  # parameter group, its all_gather, its reduce_scatter

    def __len__(self) -> int:
        """Return the number of parameter groups that are served."""
        return len(self._replaced)

    def _replace(self, param_group: Any, site: str) -> None:
        gather, scatter = _fsdp_compat.comms(param_group)
        self._replaced.append((param_group, gather, scatter))
        own_gather = _AllGather(f"{site}.all_gather", gather, param_group, self._groups, self._streams)
        own_scatter = _ReduceScatter(f"{site}.reduce_scatter", scatter, self._groups)
        _fsdp_compat.set_comms(param_group, own_gather, own_scatter)

    def remove(self) -> None:
        """Give the modules the collectives back that they had before. On all ranks, between steps. Idempotent."""
        for replaced in self._replaced:
            _fsdp_compat.set_comms(*replaced)
        self._replaced = []
        with contextlib.suppress(errors.UbOverlapError):  # of a broken group, which nothing uses any more
            for group in self._groups.own_groups():
                LandingSlots.release_all_free(group)


def install(model: torch.nn.Module) -> Installation:
    """Run the all_gathers and reduce_scatters of every `fully_shard` module in `model` on our transport.

    Call it on all ranks, after the last fully_shard and before the first forward. Sums are taken in fp32 in rank order. Groups
    without transport keep torch's collectives, as do modules with CPU offload; the log says so. The all_reduce of HSDP is
    torch's. Return the installation, whose `remove()` undoes it. OptionError for a model without such modules, or with ours.
    """
    groups = ServedGroups("fully_shard")
    installation = Installation(groups)
    named = _named_groups(model)
    if not named:
        raise errors.OptionError(
            "no module of the model is sharded by fully_shard",
            where="ub_overlap.fsdp.install",
            got=type(model).__name__,
            expected="a model to whose modules torch.distributed.fsdp.fully_shard was applied",
            fix="call install after fully_shard; torch.compile traces other kinds of ZeRO-3 by itself",
        )
    for name, index, param_group in named:
        if _is_served(param_group):
            installation.remove()
            raise errors.OptionError(
                f"module '{name}' has ub_overlap's collectives already",
                where="ub_overlap.fsdp.install",
                fix="call remove() of the first installation, or install once for the root module",
            )
        if isinstance(param_group.offload_policy, CPUOffloadPolicy):
            groups.say_once(f"module '{name}' keeps torch's collectives: its parameters are offloaded to the CPU")
            continue
        site = ".".join(part for part in ("/fsdp", name, str(index) if index else "") if part)
        installation._replace(param_group, site)
    return installation


def install_at_first_forward() -> Callable[[], None]:
    """Call `install` for every model of `fully_shard` when it first runs, unless it has been. Return what ends that.

    For programs that cannot call it (`ub_overlap.enable`). Then FSDP2 knows its root module, so the place where fully_shard was
    applied, before or after this call, does not matter.
    """

    def serve(root: torch.nn.Module) -> None:
        named = _named_groups(root)
        if torch.distributed.get_world_size() > 1 and named and not any(_is_served(group) for _, _, group in named):
            install(root)

    return _fsdp_compat.at_first_forward(serve)


def _named_groups(model: torch.nn.Module) -> list[tuple[str, int, Any]]:
    """Return (module, number in it, parameter group) of all groups. One that fully_shard([a, b]) made is named by a."""
    named = {
        id(group): (name, index, group)
        for name, module in reversed(list(model.named_modules()))  # the first module of a group names it
        if isinstance(module, FSDPModule)
        for index, group in enumerate(_fsdp_compat.param_groups(module))
    }
    return list(named.values())[::-1]


def _is_served(param_group: Any) -> bool:
    return isinstance(_fsdp_compat.comms(param_group)[0], _AllGather)


class _AllGather(compat.FSDPAllGather):  # type: ignore[misc]
    """The all_gather of one parameter group. `plain`: the one that it had."""

    def __init__(self, site: str, plain: Any, param_group: Any, groups: ServedGroups, streams: SideStreams) -> None:
        self._site, self._plain, self._param_group, self._groups, self._streams = site, plain, param_group, groups, streams

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory of the result, of which FSDP writes this rank's place: landing memory if a slot is free."""
        landing = None
        if group := self._groups.serve(_fsdp_compat.gather_group(self._param_group), device):
            landing = LandingSlots.of(group, device).allocate(math.prod(map(int, size)), dtype, self._site)
        return self._plain.allocate(size, dtype=dtype, device=device) if landing is None else landing.view(*size)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False) -> Any:
        """Gather `input_tensor`, this rank's place in `output_tensor`. Return None, or a Work if `async_op`."""
        own_group = self._groups.serve(group, output_tensor.device)
        if not own_group:
            return self._plain(output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op)
        if not async_op:
            self._gather(output_tensor, input_tensor, own_group)
            return None
        with self._streams.asynchronous(output_tensor) as future:
            self._gather(output_tensor, input_tensor, own_group)
        return compat.work_of_future(future)

    def _gather(self, out: Tensor, shard: Tensor, group: str) -> None:
        if not LandingSlots.of(group, out.device).gather(out, shard, self._site):
            gather_into(out, shard, group, self._site)


class _ReduceScatter(compat.FSDPReduceScatter):  # type: ignore[misc]
    """The reduce_scatter of one parameter group. `plain`: the one that it had."""

    def __init__(self, site: str, plain: Any, groups: ServedGroups) -> None:
        self._site, self._plain, self._groups = site, plain, groups

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory of the input, which is pushed from where it is, or of the result."""
        return self._plain.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        """Reduce `input_tensor` into `output_tensor`. Return None: FSDP orders the result by its stream."""
        kind = _reduction(op)
        if kind is None or output_tensor.dtype not in REDUCED_DTYPES:
            self._groups.say_once(f"a reduce_scatter of {output_tensor.dtype} with {op} stays torch's")
        elif not async_op and (own_group := self._groups.serve(group, output_tensor.device)):
            name, factor = kind
            reduce_scatter_into(output_tensor, input_tensor, own_group, self._site, op=name, factor=factor)
            return None
        return self._plain(output_tensor=output_tensor, input_tensor=input_tensor, group=group, op=op, async_op=async_op)


def _reduction(op: Any) -> tuple[str, float] | None:
    """Return the op of the transport and the factor of the sum that a c10d op stands for, None for other ops."""
    if op in (ReduceOp.SUM, ReduceOp.AVG):
        return ("sum" if op == ReduceOp.SUM else "avg"), 1.0
    factor = _fsdp_compat.premul_factor(op)
    return None if factor is None else ("sum", factor)
