"""Split collectives over c10d (NCCL): every rank counts as a host. Random orders, replays, and what runs meanwhile.

The expected results are those of the plain collective on the same group, bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.gpu.cases import BF16
from tests.gpu.lockstep import Lockstep
from tests.gpu.torchrun.test_split import OPS, arguments, random_orders, replays
from ub_overlap import _torch_compat as compat
from ub_overlap.runtime import settings
from ub_overlap.runtime.extension import extension
from ub_overlap.runtime.session.host_groups import name_host_groups
from ub_overlap.runtime.session.host_layout import find_layout
from ub_overlap.runtime.session.spared_multiprocessors import most_spared


@pytest.fixture
def apart(lockstep: Lockstep) -> Iterator[str]:
    """A group of ranks on different hosts, as the setting `hosts` declares."""
    before = settings.current().hosts
    settings.configure(hosts="1")
    yield lockstep.new_group()
    settings.configure(hosts=before)


def check_transport(group: str) -> None:
    (session,) = (s for s in extension().sessions() if s.group == group)
    assert session.transport == "c10d" and "do not share memory" in session.reason


@pytest.mark.parametrize("steps", [40, 200])
def test_random_orders(lockstep: Lockstep, apart: str, steps: int) -> None:
    lockstep.note(random_orders(lockstep, apart, steps))
    check_transport(apart)


@pytest.mark.own_gpus("gloo's collectives cannot be captured")
def test_replays(lockstep: Lockstep, apart: str) -> None:
    lockstep.note(replays(lockstep, apart, 40, zero_copy=False))
    check_transport(apart)


@pytest.mark.own_gpus("they take turns, so times mean nothing")
def test_what_runs_meanwhile(lockstep: Lockstep, apart: str) -> None:
    """Report the milliseconds of a gather and of matmuls, one after the other and concurrently."""
    if not lockstep.cuda:
        pytest.skip("times of the CPU mean nothing")
    left, right = (torch.randn(8192, 8192, device=lockstep.device, dtype=BF16) for _ in range(2))
    shard = torch.randn(64 << 20, device=lockstep.device, dtype=BF16)  # 128 MiB
    call = arguments("all_gather", BF16, 0, apart, "meanwhile")

    def step(gathers: bool, multiplies: bool, together: bool) -> None:
        token = OPS.start_collective(shard, *call) if gathers else None
        if gathers and not together:
            OPS.finish_collective(token, shard, *call)
        for _ in range(2 if multiplies else 0):
            torch.mm(left, right)
        if gathers and together:
            OPS.finish_collective(token, shard, *call)

    def ms(*which: bool) -> float:
        times = []
        for _ in range(9):
            lockstep.sync()
            lockstep.barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step(*which)
            end.record()
            lockstep.sync()
            times.append(begin.elapsed_time(end))
        return sorted(times)[4]

    gather, multiply = ms(True, False, False), ms(False, True, False)
    serial, together = ms(True, True, False), ms(True, True, True)
    lockstep.note(f"ms: gather {gather:.3f}, matmuls {multiply:.3f}, in a row {serial:.3f}, concurrently {together:.3f}")
    assert together < serial


def test_matmuls_leave_multiprocessors(lockstep: Lockstep, apart: str) -> None:
    """From the first start to the last finish."""
    shard = torch.ones(1024, device=lockstep.device, dtype=BF16)
    seen, tokens = [compat.get_carveout()], {}
    for starts, slot in ((True, 0), (True, 1), (False, 0), (False, 1)):
        call = arguments("all_gather", BF16, slot, apart, f"leave.{slot}")
        if starts:
            tokens[slot] = OPS.start_collective(shard, *call)
        else:
            OPS.finish_collective(tokens[slot], shard, *call)
        seen.append(compat.get_carveout())
    lockstep.sync()
    given = min(most_spared(apart, shard.device.type), settings.current().nccl_multiprocessors) or None
    assert seen == [None, given, given, given, None]
    if lockstep.backend == "nccl" and torch.cuda.get_device_capability() >= (9, 0):
        assert given == settings.current().nccl_multiprocessors


@pytest.fixture
def two_hosts(lockstep: Lockstep) -> Iterator[str]:
    """A group whose ranks are on two hosts, several on each, as the setting `hosts` declares."""
    if lockstep.ranks < 4 or lockstep.ranks % 2:
        pytest.skip("needs two hosts of several ranks")
    before = settings.current().hosts
    settings.configure(hosts=str(lockstep.ranks // 2))
    group = lockstep.new_group()
    name_host_groups()  # as each compilation does
    yield group
    settings.configure(hosts=before)


@pytest.mark.own_gpus("across hosts a group of gloo has no backend for GPU tensors")
def test_hierarchical(lockstep: Lockstep, two_hosts: str) -> None:
    """Both halves of gathers and reduce_scatters, several at once, with the plain collective's results."""
    layout = find_layout(two_hosts)
    assert layout is not None and layout.hosts == 2
    hosts, each, device = layout.hosts, layout.ranks_per_host, lockstep.device

    def half(x: torch.Tensor, collective: str, slot: int, group: str) -> torch.Tensor:
        call = arguments(collective, x.dtype, slot, group, f"hierarchical.{group}")
        token = OPS.start_collective(x, *call)
        torch.mm(filler, filler)
        return OPS.finish_collective(token, x, *call)

    filler = torch.randn(2048, 2048, device=device)
    for step in range(10):
        rows = 64 * (step + 1)
        shard = torch.randint(-8, 9, (rows, 24), device=device).to(BF16)
        gathered = half(half(shard, "all_gather", 0, layout.across), "all_gather", 0, layout.within)
        gathered = gathered.view(each, hosts, rows, 24).transpose(0, 1).reshape(-1, 24)
        plain = torch.empty_like(gathered)
        torch.distributed.all_gather_into_tensor(plain, shard)
        assert torch.equal(gathered, plain)
        whole = torch.randint(-8, 9, (lockstep.ranks * rows, 24), device=device).float()
        blocks = whole.view(hosts, each, rows, 24).transpose(0, 1).reshape(-1, 24)
        reduced = half(half(blocks, "reduce_scatter", 1, layout.within), "reduce_scatter", 1, layout.across)
        total = torch.empty_like(reduced)
        torch.distributed.reduce_scatter_tensor(total, whole)
        assert torch.equal(reduced, total), "small integers have exact sums"
    transports = {s.group: s.transport for s in extension().sessions()}
    assert transports[layout.across] == "c10d" and transports[layout.within] != "c10d"
