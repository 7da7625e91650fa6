"""DistributedDataParallel over our transport: a communication hook for eager DDP.

    bucket of gradients -> (cast to the wire dtype) -> all_reduce, summed in fp32, mean -> the bucket

A hook runs on side streams, as c10d's collectives do, so backward goes on. Two slots are used in turn. On CUDA the executor
runs eager calls of a group one after the other, on all streams: a piece is pushed once the one before is summed.

Large buckets are reduced in pieces, which bounds landing memory: the first step has one bucket, with all gradients.

DistributedDataParallel checks the annotations of a hook, so they are types here, not text.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket, ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from .. import errors
from .asynchronous import SideStreams
from .eager_collectives import REDUCE_SLOTS, REDUCED_DTYPES, all_reduce_into
from .served_groups import ServedGroups

_COMPRESSIONS = {torch.bfloat16: default_hooks.bf16_compress_hook, torch.float16: default_hooks.fp16_compress_hook}


@dataclass
class HookState:
    """The state of `all_reduce_hook`: the group (None: the world), and the dtype that gradients travel in.

    `wire_dtype`: None for the gradients' own. torch.bfloat16 or torch.float16: both halves of the all_reduce send it; sums are
    taken in fp32 and rounded once.
    """

    group: ProcessGroup | None = None
    wire_dtype: torch.dtype | None = None
    _groups: ServedGroups = field(default_factory=lambda: ServedGroups("DistributedDataParallel"), init=False, repr=False)
    _streams: SideStreams = field(default_factory=lambda: SideStreams(len(REDUCE_SLOTS)), init=False, repr=False)

    def __post_init__(self) -> None:
        if self.wire_dtype not in (None, *_COMPRESSIONS):
            raise errors.OptionError(
                "invalid dtype for gradients",
                where="ub_overlap.ddp.HookState",
                got=str(self.wire_dtype),
                expected="None, torch.bfloat16 or torch.float16",
            )

    def _reduce(self, bucket: GradBucket) -> Future[Tensor]:
        group = _world() if self.group is None else self.group
        gradients = bucket.buffer()
        if gradients.dtype not in REDUCED_DTYPES:
            self._groups.say_once(f"buckets of {gradients.dtype} keep torch's collectives")
        elif own_group := self._groups.serve(group, gradients.device):
            index = bucket.index()
            with self._streams.asynchronous(gradients, index) as future:
                sent = gradients if self.wire_dtype is None else gradients.to(self.wire_dtype)
                all_reduce_into(sent, sent, own_group, f"/ddp.bucket{index}", op="avg", index=index)
                if sent is not gradients:
                    gradients.copy_(sent)
            return future
        plain = default_hooks.allreduce_hook if self.wire_dtype is None else _COMPRESSIONS[self.wire_dtype]
        return plain(group, bucket)


def all_reduce_hook(state: HookState, bucket: GradBucket) -> Future[Tensor]:
    """Average a bucket over the ranks on our transport: `model.register_comm_hook(HookState(), all_reduce_hook)`.

    The result has the bucket's memory. Groups without transport, and float64, keep torch's all_reduce; the log says so.
    """
    return state._reduce(bucket)


def install(model: DistributedDataParallel, wire_dtype: torch.dtype | None = None) -> HookState:
    """Register `all_reduce_hook` with the group of `model`. On all ranks, before the first backward. Return its state.

    DistributedDataParallel has one hook, which stays. RuntimeError from torch if it has one already.
    """
    state = HookState(_group_of(model), wire_dtype)
    model.register_comm_hook(state, all_reduce_hook)
    return state


def _group_of(model: Any) -> ProcessGroup:
    return model.process_group


def _world() -> ProcessGroup:
    group = torch.distributed.group.WORLD
    assert group is not None, "DistributedDataParallel needs a process group"
    return group
