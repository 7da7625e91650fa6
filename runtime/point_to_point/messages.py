"""send, recv, isend, irecv: torch.distributed's functions, over channels."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from ub_overlap import _torch_compat

from .. import errors
from ..extension import extension
from ..session.group_argument import Group, name_of
from .connect import connect


class Request(Protocol):
    """A message that was issued. c10d's Work, where the group has no transport."""

    def wait(self) -> Any:
        """Wait for the message. On CUDA, the current stream waits, and the host does not."""

    def is_completed(self) -> bool:
        """Return whether the tensor was sent or received."""


def isend(
    tensor: torch.Tensor, dst: int | None = None, group: Group = None, tag: int = 0, group_dst: int | None = None
) -> Request:
    """Send `tensor` to a rank, and return at once. As torch.distributed.isend.

    `dst`: its global rank, or `group_dst`: its rank in the group. Do not change `tensor` before the message is completed.
    Messages from one rank to another arrive in the order in which both issue them. `tag`, dtype and bytes must be equal on both
    ends.

    At the first message of a group all of its ranks set up channels, as for a collective. A message is pushed as soon as its
    tensor is ready and a slot is free, also before its receive is issued. A receive that is issued early delays no send.
    """
    return _issue(tensor, True, dst, group_dst, group, tag)


def irecv(
    tensor: torch.Tensor, src: int | None = None, group: Group = None, tag: int = 0, group_src: int | None = None
) -> Request:
    """Receive from a rank into `tensor`, and return at once. As torch.distributed.irecv, but the source must be named."""
    return _issue(tensor, False, src, group_src, group, tag)


def send(tensor: torch.Tensor, dst: int | None = None, group: Group = None, tag: int = 0, group_dst: int | None = None) -> None:
    """Send `tensor` to a rank. Return when `tensor` may be changed; on CUDA, by later work of the current stream.

    The message may be received later. See `isend`.
    """
    isend(tensor, dst, group, tag, group_dst).wait()


def recv(tensor: torch.Tensor, src: int | None = None, group: Group = None, tag: int = 0, group_src: int | None = None) -> None:
    """Receive from a rank into `tensor`. See `irecv`."""
    irecv(tensor, src, group, tag, group_src).wait()


def _issue(tensor: torch.Tensor, sends: bool, peer: int | None, group_peer: int | None, group: Group, tag: int) -> Request:
    name = name_of(group)
    op = "isend" if sends else "irecv"
    if (peer is None) == (group_peer is None):
        raise errors.OptionError(
            f"{op} needs one peer", got=f"global rank {peer}, rank in the group {group_peer}", expected="exactly one of them"
        )
    members = _torch_compat.group_of(name)
    if group_peer is None:
        assert peer is not None, "one of the two is given"
        group_peer = dist.get_group_rank(members, peer)
    device = tensor.device.type
    channels = extension().find_channels(name, device)
    if channels is None:
        channels = connect(name, device, tensor.nbytes)
    if channels is not None:
        return channels.issue(tensor.detach(), sends, group_peer, tag)
    plain = dist.isend if sends else dist.irecv
    request = plain(tensor, group=members, tag=tag, **{"group_dst" if sends else "group_src": group_peer})
    assert request is not None, "name_of has refused groups without this rank"
    return request
