"""Decide whether the casts after a gather may move before it, with a reason if not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch.fx import Node

from ub_overlap import _torch_compat as compat

from ...cost.policy import Policy
from ...cost.site_sizes import Hints
from ...graph.aten import aten, dtype_of, node_arg, shape_of, tensor_of
from ...graph.sizes import Size
from ...plan.reasons import Reason
from ..emitted_sizes import find_unknown_size, sizes_to_emit
from .gather_readers import GatherReaders
from .rebuild_on_shard import ShardRebuilder
from .regather_cost import explain_no_gain, find_float8_matmuls

StayReason = tuple[Reason, str]
"""(reason, detail) why casts stay after their gather."""


@dataclass(frozen=True, slots=True)
class HoistConfig:
    """The limits set by the options and the runtime."""

    policy: Policy
    """Casts stay if a rank sends less than its threshold: the collectives of scales would take longer than the float8 gather
    saves. Its profile predicts whether a second gather is faster."""
    transport: Callable[[str, str, int], str | None]
    """(device type, group, ranks) -> why no collective of the group can be overlapped, or None."""
    has_uneven_inputs: bool = False
    """Whether ranks hold different sizes of an input: then no decision may depend on a rank's own sizes."""


def find_stay_reason(
    readers: GatherReaders, backward: set[Node], inputs: Sequence[Node], config: HoistConfig, hints: Hints
) -> StayReason | None:
    """Return why the casts of `readers` stay after their gather, or None. `backward`: the nodes of the backward half."""
    gather, cast = readers.gather, min(readers.casts)
    policy = config.policy
    sent = policy.bytes_sent_in(gather, dtype_of(gather).itemsize, hints)
    if policy.is_below_threshold(sent):
        return Reason.BELOW_THRESHOLD, f"{cast.name} stays behind it: a rank sends {sent} bytes, below {policy.threshold}"
    counts = _count_row_computations(readers)
    if counts is not None and counts != (1, 1):
        detail = f"{counts[0]} casts of its rows, read with {counts[1]} scales of them"
        return Reason.CAST_IN_BETWEEN, f"{cast.name} stays behind it: {detail}"
    if (size := find_unknown_size(inputs, _sizes_to_emit(readers))) is not None:
        return Reason.DYNAMIC_SHAPE, f"{cast.name} stays behind it: size {size} cannot be computed from the graph's inputs"
    return _find_regather_reason(readers, backward, config, hints) if readers.others else None


def _count_row_computations(readers: GatherReaders) -> tuple[int, int] | None:
    """Return the numbers of different per-row casts and of different per-row scales, or None without per-row casts."""
    if not any(s.is_per_row for s in readers.casts.values()):
        return None
    rebuilder = ShardRebuilder(readers, node_arg(readers.gather), ())
    casts = {rebuilder.key(c) for c, s in readers.casts.items() if s.is_per_row}
    scales = {rebuilder.key(n) for n in readers.find_row_values()[1]}
    return len(casts), len(scales)


def _sizes_to_emit(readers: GatherReaders) -> Iterator[Size]:
    """Yield the sizes that moving the casts may need: of reshapes, and of pieces that are joined again."""
    for node in (*readers.aliases, *readers.amaxes, *readers.find_row_values()[1]):
        if tensor_of(node) is not None:
            yield from sizes_to_emit(shape_of(node), joined=any(u.target is aten.cat.default for u in node.users))


def _find_regather_reason(readers: GatherReaders, backward: set[Node], config: HoistConfig, hints: Hints) -> StayReason | None:
    """Return why a gather that others read in 16 bits is not repeated."""
    gather, policy = readers.gather, config.policy
    sent = policy.bytes_sent_in(gather, 1, hints)
    in_forward = [n for n in readers.others if n not in backward or n.op == "output"]
    other = min(in_forward or readers.others)
    if in_forward or gather in backward:
        return Reason.CAST_IN_BETWEEN, f"{min(readers.casts).name} stays behind it: {other.name} needs the 16 bits"
    device, group, ranks = gather.meta["val"].device.type, str(gather.args[2]), int(gather.args[1])  # type: ignore[call-overload]
    marked = [n for n in (gather, *readers.aliases, *readers.elementwise) if "recompute" in n.meta]
    if config.has_uneven_inputs:
        reason, why = Reason.CAST_IN_BETWEEN, "ranks hold different sizes of a graph input, and must decide alike"
    elif not all(compat.is_computed_again(n.meta["recompute"]) for n in marked):
        reason, why = Reason.CAST_IN_BETWEEN, "a checkpoint policy of the program saves it"
    elif not find_float8_matmuls(readers):
        reason, why = Reason.NO_MATMUL, "no matmul could run concurrently with the float8 rows"
    elif policy.is_below_threshold(sent):
        reason, why = Reason.BELOW_THRESHOLD, f"in float8 a rank sends {sent} bytes, below {policy.threshold}"
    elif no_transport := config.transport(device, group, ranks):
        reason, why = Reason.NO_TRANSPORT, no_transport
    elif not policy.is_forced:
        reason, why = Reason.NO_GAIN, explain_no_gain(readers, policy.profile(ranks, device), hints)
    else:
        return None
    return (reason, f"not gathered twice for {other.name}, which needs the 16 bits: {why}") if why else None
