"""Resolve a group argument: a ProcessGroup, a 1D DeviceMesh, (mesh, dim), a c10d group name, or None for the world."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch.distributed as dist

from ub_overlap import _torch_compat

from .. import errors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    Group: TypeAlias = dist.ProcessGroup | DeviceMesh | tuple[DeviceMesh, int | str] | str | None
else:
    Group: TypeAlias = Any

_EXPECTED = "a ProcessGroup, a DeviceMesh of one dim, (DeviceMesh, dim), a group name, or None for the world"


def name_of(group: Group) -> str:
    """Return c10d's name of `group`. Raise OptionError for an invalid group, or one that this process is not in."""
    from torch.distributed.device_mesh import DeviceMesh

    if not dist.is_initialized():
        raise errors.OptionError(
            "no process group",
            got="torch.distributed is not initialized",
            fix="call torch.distributed.init_process_group or init_device_mesh first",
        )
    if group is None:
        group = dist.group.WORLD
    dim = None
    if isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], DeviceMesh):
        group, dim = group
    if isinstance(group, DeviceMesh):
        if dim is None and group.ndim != 1:
            raise errors.OptionError(
                "a mesh of several dims is not a group", got=f"{group.ndim} dims", expected="one dim, or (mesh, dim)"
            )
        try:
            group = group.get_group(dim)
        except (KeyError, IndexError, RuntimeError, ValueError) as error:
            known = group.mesh_dim_names or tuple(range(group.ndim))
            raise errors.OptionError("the mesh has no such dim", got=repr(dim), expected=f"one of {known}") from error
    if isinstance(group, str):
        try:
            _torch_compat.group_of(group)
        except (RuntimeError, ValueError, KeyError) as error:
            raise errors.OptionError("no process group has this name", got=repr(group), expected=_EXPECTED) from error
        return group
    if not isinstance(group, dist.ProcessGroup):
        got = "a group that this process is not in" if group is dist.GroupMember.NON_GROUP_MEMBER else repr(group)
        raise errors.OptionError("not a group of this process", got=got, expected=_EXPECTED)
    return str(group.group_name)
