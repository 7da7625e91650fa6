"""Messages between GPUs: values, order, pieces, streams, an early receive, mismatches, and torch's pipelining."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ub_overlap
from tests.gpu.lockstep import Lockstep
from ub_overlap.runtime import errors


def numbers(device: torch.device, source: int, destination: int, index: int, count: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(index * 100 + source * 10 + destination)
    return torch.randn(count, generator=generator, device=device)


def test_any_order_and_size(lockstep: Lockstep) -> None:
    """Every ordered pair exchanges messages of random sizes, in an order of its own. Some are larger than a slot."""
    group, rank = lockstep.new_group(), dist.get_rank()
    assert ub_overlap.initialize_point_to_point(group, 1 << 20, slots=2) == 1 << 20
    pairs = [(s, d) for s in range(lockstep.ranks) for d in range(lockstep.ranks) if s != d]
    plan, mine = random.Random(3), random.Random(rank)
    sizes = {pair: [plan.choice([0, 1, 1000, 1 << 18, (1 << 18) + 1, 1 << 20]) for _ in range(30)] for pair in pairs}
    todo = {pair: 0 for pair in pairs if rank in pair}
    received: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
    while todo:
        pair = mine.choice(sorted(todo))
        index = todo[pair]
        tensor = numbers(lockstep.device, *pair, index, sizes[pair][index])
        if pair[0] == rank:
            ub_overlap.isend(tensor, group=group, group_dst=pair[1])  # the transport keeps `tensor`
        else:
            out = torch.full_like(tensor, -1.0)
            received.append((ub_overlap.irecv(out, group=group, group_src=pair[0]), out, tensor))
        todo[pair] += 1
        if todo[pair] == 30:
            del todo[pair]
    mine.shuffle(received)
    for request, out, want in received:
        request.wait()
        torch.testing.assert_close(out, want, rtol=0, atol=0)


def test_a_message_follows_its_tensor(lockstep: Lockstep) -> None:
    """The matmul that makes a tensor runs on the caller's stream, the push on another. So does what reads the result."""
    group, rank = lockstep.new_group(), dist.get_rank()
    a = torch.full((2048, 2048), 1 / 64, device=lockstep.device)
    for turn in range(10):
        if rank == 0:
            out = a @ a + turn
            for peer in range(1, lockstep.ranks):
                ub_overlap.send(out, group=group, group_dst=peer)
            out.fill_(-1.0)  # later work of the stream: the message was sent
        else:
            out = torch.zeros_like(a)
            ub_overlap.recv(out, group=group, group_src=0)
            assert ((out - 0.5 - turn).abs() < 1e-3).all()


def test_an_early_receive_delays_no_send(lockstep: Lockstep) -> None:
    group, rank = lockstep.new_group(), dist.get_rank()
    if rank > 1:
        ub_overlap.initialize_point_to_point(group, 4)
        return
    ub_overlap.initialize_point_to_point(group, 4)
    value, answer = torch.zeros(4, device=lockstep.device), torch.zeros(4, device=lockstep.device)
    early = ub_overlap.irecv(answer, group=group, group_src=1 - rank)
    if rank == 1:
        ub_overlap.send(value + 3, group=group, group_dst=0)
        early.wait()
        assert answer.tolist() == [4.0] * 4
    else:
        early.wait()
        ub_overlap.send(answer + 1, group=group, group_dst=1)
        assert answer.tolist() == [3.0] * 4


def test_a_mismatch_names_both_ends(lockstep: Lockstep, own_group: str) -> None:
    rank = dist.get_rank()
    ub_overlap.initialize_point_to_point(own_group, 1 << 20, device=lockstep.device)
    if rank == 1:
        out = torch.zeros(4, device=lockstep.device)
        ub_overlap.irecv(out, group=own_group, group_src=0).wait()
        torch.cuda.synchronize()
        assert out.isnan().all()
        with pytest.raises(errors.ShapeMismatchError, match=r"(?s)channel 0 -> 1.*Float \[8\].*Float \[4\]"):
            ub_overlap.check_errors(own_group)
    elif rank == 0:
        ub_overlap.send(torch.zeros(8, device=lockstep.device), group=own_group, group_dst=1)


def test_captures_are_refused(lockstep: Lockstep) -> None:
    group, rank = lockstep.new_group(), dist.get_rank()
    ub_overlap.initialize_point_to_point(group, 1 << 20)
    tensor = torch.zeros(4, device=lockstep.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        try:
            with pytest.raises(errors.OptionError, match="cannot be captured"):
                ub_overlap.isend(tensor, group=group, group_dst=(rank + 1) % lockstep.ranks)
        finally:
            graph.capture_end()


@pytest.mark.own_gpus("collectives of such a group are NCCL's")
def test_batch_isend_irecv(lockstep: Lockstep) -> None:
    """c10d's calls on a group that `pipeline.make_group` makes. Collectives of the group stay NCCL's."""
    rank = dist.get_rank()
    group = ub_overlap.pipeline.make_group(lockstep.group())
    right, left = (rank + 1) % lockstep.ranks, (rank - 1) % lockstep.ranks
    for turn in range(3):
        out = torch.zeros(1000, device=lockstep.device)
        value = torch.full((1000,), float(10 * turn + rank), device=lockstep.device)
        ops = [
            dist.P2POp(dist.irecv, out, group=group, group_peer=left),
            dist.P2POp(dist.isend, value, group=group, group_peer=right),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert out.eq(10 * turn + left).all()
    total = torch.ones(1, device=lockstep.device)
    dist.all_reduce(total, group=group)
    assert total.item() == lockstep.ranks
