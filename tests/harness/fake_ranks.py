"""Ranks that do not exist: this process is rank 0 of a "fake" group, whose collectives move nothing.

    plans = FakeRanks(2).run(compile_and_plan, ...)[0]      function(0, 2, ...), as RankPool.run on each rank

For tests of structure: sites, decisions, reasons, plans and rewritten graphs. The passes see a group that can be served, and
ops run as plain collectives. So shapes are right and values are not; numbers are for pools of ranks (ranks.py).
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.harness.ranks import forget_meshes
from ub_overlap import _torch_compat as compat
from ub_overlap.runtime import settings
from ub_overlap.runtime.session import bind as binding
from ub_overlap.runtime.session import transport
from ub_overlap.runtime.session.session import Session


class FakeRanks:
    """`world` ranks, of which rank 0 runs in this process, with some settings of ub_overlap, such as hosts="1"."""

    def __init__(self, world: int, **chosen: Any) -> None:
        self.world = world
        self._chosen = chosen

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Return [function(0, world, *args, **kwargs)]."""
        with self.group():
            return [function(0, self.world, *args, **kwargs)]

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Make the default group of this process a fake one of `world` ranks."""
        dist.init_process_group("fake", store=compat.FakeStore(), rank=0, world_size=self.world)
        before = settings.current()
        try:
            torch.compiler.reset()
            forget_meshes()
            torch.manual_seed(0)
            random.seed(0)
            settings.keep(replace(before, **self._chosen))
            with mock.patch.object(transport, "unsupported_reason", _served), mock.patch.multiple(binding, **_ALONE):
                yield
        finally:
            settings.keep(before)
            torch.compiler.reset()
            dist.destroy_process_group()


_unsupported_reason = transport.unsupported_reason


def _served(device: str, group: str, ranks: int) -> str | None:
    """Return why a group cannot be served, as if its ranks existed."""
    with mock.patch.object(compat, "is_fake_group", return_value=False):
        return _unsupported_reason(device, group, ranks)


def _bind_alone(exchange: mock.Mock, _device: str, _slot_bytes: int) -> Session:
    """Return a session without peers, whose ops are plain collectives."""
    _, group, device, rank, ranks, *_ = exchange.arguments
    return binding._make_session(group, device, rank, ranks, None, None, "c10d", "fake ranks")


_ALONE: dict[str, Any] = {
    "Exchange": lambda *arguments: mock.Mock(arguments=arguments),
    "_bind_ranks": _bind_alone,
    "watchdog": mock.Mock(),
    "abort_signal": mock.Mock(),
}
"""What stands for the peers while a group binds (runtime/session/bind.py)."""
