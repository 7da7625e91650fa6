"""A stage of torch.distributed.pipelining whose weight gradients run behind the send of its input's gradient.

PipelineStage    backward: gradients of input and weights | send
Stage            backward: gradient of the input | send | gradients of weights
                 I and W of zero-bubble schedules: gradient of the input | ... | gradients of weights
"""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from ub_overlap import _torch_compat

from .. import errors
from ..deferred_gradients import DeferredGradients, ParameterHooks, collect
from ..extension import extension
from ..session.group_argument import name_of
from .send_order import Outgoing, of_group
from .stage_data_parallel import GradientSync, gradient_sync

log = logging.getLogger(__name__)


class Stage(PipelineStage):
    """A PipelineStage for modules compiled in place with the option defer_weight_gradients, for all schedules.

        module.compile(backend="ub_overlap", options={"defer_weight_gradients": True})
        stage = ub_overlap.pipeline.Stage(module, index, stages, device, group=ub_overlap.pipeline.make_group(mesh["pp"]))

    The backward of a microbatch computes the gradient of the input, sends it, and then computes the gradients of parameters.
    Where a schedule has I and W (zero bubble), they are these two parts. Arguments are those of PipelineStage, without
    `dw_builder`, which this class uses.

    A group without channels sends behind the whole backward, as PipelineStage does. Modules that were not compiled so compute
    all gradients at once, also in I.

    The module may be wrapped in DistributedDataParallel, or fully_shard may be applied to it. Gradients are then accumulated
    over the microbatches, and reduced once after the last of a step.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if "dw_builder" in kwargs:
            raise errors.OptionError("Stage has a dw_builder of its own", where="ub_overlap.pipeline.Stage", got="dw_builder")
        super().__init__(*args, dw_builder=lambda: _do_nothing, **kwargs)
        self._hooks, self._order = ParameterHooks(), of_group(_torch_compat.group_of(name_of(self.group)))
        self._deferred: dict[int, DeferredGradients] = {}  # by microbatch, until its W
        self._sent: dict[int, list[dist.P2POp]] = {}  # by microbatch, until the schedule asks for its sends
        self._gradient_sync: GradientSync | None = None
        self._has_warned = False

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Compute the gradient of the input, and with `full_backward` send it and compute the others."""
        if not self.has_backward:
            return
        with collect(self._hooks, self._sync().parameters()) as collected:
            super().backward_one_chunk(bwd_chunk_id, loss=loss, full_backward=False, last_backward=False)
        self._deferred[bwd_chunk_id] = collected
        if not collected:
            self._warn()
        if not full_backward:
            self._note(bwd_chunk_id, True, self.stage_index - 1)
            return
        peer, order = self._rank_of(self.stage_index - 1), self._order
        if collected and peer is not None and order.may_send_early(peer) and self._has_channels():
            self._sent[bwd_chunk_id] = [_issued(op) for op in super().get_bwd_send_ops(bwd_chunk_id)]
            order.add_early(Outgoing(self.stage_index, bwd_chunk_id, True), peer)
        else:
            self._note(bwd_chunk_id, True, self.stage_index - 1)
        self.backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Compute the gradients of parameters, and reduce them after the last microbatch."""
        if self.has_backward:
            super().backward_weight_one_chunk(bwd_chunk_id)
            self._sync().run(self._deferred.pop(bwd_chunk_id), last_backward)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Compute the output of a microbatch."""
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._note(fwd_chunk_id, False, self.stage_index + 1)
        return output

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of the output."""
        self._order.send(Outgoing(self.stage_index, fwd_chunk_id, False))
        return super().get_fwd_send_ops(fwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of the input's gradient, which may have been issued."""
        self._order.send(Outgoing(self.stage_index, bwd_chunk_id, True))
        issued = self._sent.pop(bwd_chunk_id, None)
        return super().get_bwd_send_ops(bwd_chunk_id) if issued is None else issued

    def clear_runtime_states(self) -> None:
        """Forget the microbatches of the last step."""
        self._sent.clear()
        self._deferred.clear()
        self._order.forget(self.stage_index)
        super().clear_runtime_states()

    def _rank_of(self, stage: int) -> int | None:
        """Return the rank in the group of another stage; None if there is none, or on this rank."""
        rank = self.stage_index_to_group_rank.get(stage)
        return None if rank == self.group_rank else rank

    def _note(self, microbatch: int, is_gradient: bool, receiver: int) -> None:
        peer = self._rank_of(receiver)
        if peer is not None:
            self._order.add(Outgoing(self.stage_index, microbatch, is_gradient), peer)

    def _has_channels(self) -> bool:
        """Return whether messages take channels. NCCL may need the schedule's order of sends and receives."""
        if getattr(self, "p2p_per_edge", False):  # torch 2.15 then sends in groups of its own
            return False
        return extension().find_channels(name_of(self.group), self.device.type) is not None

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        """Let torch infer the shapes of outputs, by a forward for which DistributedDataParallel expects no backward."""
        with self._sync().without_reduction():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return the first messages of torch up to 2.14, without those that a V would send to its own rank."""
        ops = super()._get_init_p2p_neighbors_ops()  # type: ignore[misc]
        return [op for op in ops if op.group_peer != self.group_rank]

    def _sync(self) -> GradientSync:
        if self._gradient_sync is None or self._gradient_sync.module is not self.submod:
            self._gradient_sync = gradient_sync(self.submod)
        return self._gradient_sync

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "stage %d defers no weight gradient: compile its module in place, by backend='ub_overlap' with "
                "options={'defer_weight_gradients': True}",
                self.stage_index,
            )


def _do_nothing() -> None:
    """Be the weight gradients that torch asks for: backward_weight_one_chunk runs them."""


def _issued(op: dist.P2POp) -> dist.P2POp:
    """Issue a message. Return a P2POp that gives its Work to the schedule, which waits for it as for its own."""
    work = dist.isend(op.tensor, group=op.group, tag=op.tag, group_dst=op.group_peer)
    op.op = lambda *_args, **_kwargs: work
    return op
