"""The c10d backend "ub_overlap", whose sends and receives use channels. Importing this module registers it.

torch.distributed.pipelining and any other caller of c10d use it as they use NCCL. Collectives are those of gloo (CPU) and NCCL.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from ub_overlap import _c10d_compat, _torch_compat

from ..extension import extension
from ..session.group_argument import Group, name_of
from ..session.made_groups import make_group_like
from . import connect as connect  # sets the callback that makes channels

BACKEND = "ub_overlap"
"""For init_process_group, new_group, and init_device_mesh(backend_override={"pp": "ub_overlap"})."""


def make_group(group: Group = None, *, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Return a new process group of the ranks of `group`, in their order, which sends and receives through channels.

    Its collectives are those of gloo and NCCL. Pass it to `PipelineStage(group=...)`: schedules use it unchanged, and
    `batch_isend_irecv` too. Messages of a pair of ranks need the same order, dtype, bytes and tag on both ends.
    `group`: a ProcessGroup, a dim of a DeviceMesh, (mesh, dim), or None for the world. Collective over its ranks, not over the
    world: each rank waits for the others by the deadline of a first call (`init_timeout_s`), and `ub_overlap.abort` of `group`
    ends that. `timeout`: of the collectives; messages have the deadline of a step.
    """
    name = name_of(group)
    limit = default_pg_timeout if timeout is None else timeout
    return make_group_like(_torch_compat.group_of(name), BACKEND, limit, f"messages of {name}", "pipeline.make_group")


def _create(options: Any, nccl_options: Any) -> Any:
    return _c10d_compat.make_process_group(options, nccl_options, extension().use_channels)


if not hasattr(dist.Backend, BACKEND.upper()):
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
