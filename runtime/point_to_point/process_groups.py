"""Process groups whose sends and receives use channels, for torch.distributed.pipelining and any other caller of c10d."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ub_overlap import _torch_compat

from .. import errors
from ..extension import extension
from ..session.group_argument import Group, name_of
from . import connect as connect  # sets the callback that makes channels

if TYPE_CHECKING:
    ProcessGroup = dist.ProcessGroup
else:
    ProcessGroup = Any


def make_group(group: Group = None, *, timeout: timedelta | None = None) -> ProcessGroup:
    """Return a new process group of the ranks of `group`, which sends and receives through channels.

    Its other collectives are those of `group`'s backends. Pass it to `PipelineStage(group=...)`: schedules use it unchanged,
    and `batch_isend_irecv` too. Messages of a pair of ranks need the same order, dtype, bytes and tag on both ends.
    `group`: a ProcessGroup, a dim of a DeviceMesh, (mesh, dim), or None for the world. Collective over its ranks, not over the
    world. `timeout`: of the collectives; messages have the deadline of a step.
    """
    members = _torch_compat.group_of(name_of(group))
    ranks = dist.get_process_group_ranks(members)
    made = dist.new_group(
        ranks,
        timeout=timeout,
        backend=dist.get_backend_config(members),
        use_local_synchronization=True,
        group_desc="ub_overlap",
    )
    if dist.get_process_group_ranks(made) != ranks:
        raise errors.OptionError(
            "the ranks of a group for messages must be sorted",
            where="ub_overlap.pipeline.make_group",
            got=f"global ranks {ranks}",
            fix="order the devices of the mesh by rank",
        )
    extension().use_channels(made.group_name)
    return made
