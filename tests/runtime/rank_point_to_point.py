"""Rank functions of test_point_to_point.py: messages in any order and of any size, misuse, and ranks that fail."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import ub_overlap
from ub_overlap import _c10d_compat
from ub_overlap.runtime import errors, ops, settings
from ub_overlap.runtime.session import channels

from .rank_failures import attempt
from .rank_sessions import reset


def fresh(world: int, size: int = 1 << 16, slots: int = 2) -> Any:
    group = dist.new_group(list(range(world)))
    ub_overlap.initialize_point_to_point(group, size, slots=slots)
    return group


def numbers(source: int, destination: int, index: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(index * 100 + source * 10 + destination))


def random_messages(rank: int, world: int, seed: int, count: int) -> list[str]:
    """Every ordered pair exchanges `count` messages of random sizes; receives and sends are issued in random order."""
    group = fresh(world, slots=1 + seed % 3)
    with reset():
        plan = random.Random(seed)
        sizes = {
            (s, d): [plan.choice([0, 1, 7, 1000, 16384, 16385, 70000, 300000]) for _ in range(count)]
            for s in range(world)
            for d in range(world)
            if s != d
        }
        mine = random.Random(seed * 7 + rank)
        todo = {pair: 0 for pair in sizes if rank in pair}
        issued: list[tuple[Any, torch.Tensor, torch.Tensor | None]] = []
        while todo:
            pair = mine.choice(sorted(todo))
            index = todo[pair]
            tensor = numbers(*pair, index, sizes[pair][index])
            if pair[0] == rank:
                issued.append((ub_overlap.isend(tensor, group=group, group_dst=pair[1]), tensor, None))
            else:
                got = torch.full_like(tensor, -1.0)
                issued.append((ub_overlap.irecv(got, group=group, group_src=pair[0]), got, tensor))
            todo[pair] += 1
            if todo[pair] == count:
                del todo[pair]
        wrong = []
        mine.shuffle(issued)
        for request, tensor, want in issued:
            request.wait()
            if not request.is_completed():
                wrong.append("not completed after wait")
            if want is not None and not torch.equal(tensor, want):
                wrong.append(f"{tuple(tensor.shape)} differs")
        return wrong


def early_receive(rank: int, world: int) -> dict[str, Any]:
    """Rank 1 receives early, for a message that is sent only after rank 0 has received one from rank 1."""
    group = fresh(world)
    tensor, answer = torch.zeros(4), torch.zeros(4)
    if rank == 0:
        early = ub_overlap.irecv(tensor, group=group, group_src=1)
        early.wait()
        ub_overlap.send(tensor + 1, group=group, group_dst=1)
        return {"value": tensor.tolist()}
    early = ub_overlap.irecv(answer, group=group, group_src=0)
    time.sleep(0.2)
    before = early.is_completed()
    ub_overlap.send(torch.full((4,), 3.0), group=group, group_dst=0)
    early.wait()
    return {"value": answer.tolist(), "before": before}


def dtypes(rank: int, world: int) -> list[str]:
    """Messages of every kind of dtype and layout, of a group of global ranks in another order."""
    group = dist.new_group(list(range(world)))
    wrong = []
    for index, dtype in enumerate(
        (torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float64)
    ):
        want = torch.arange(24).reshape(4, 6).to(torch.float32).to(dtype)
        if rank == 0:
            ub_overlap.send(want.t().contiguous().t(), dst=1, group=group, tag=index)  # not contiguous
        else:
            got = torch.zeros_like(want)
            ub_overlap.recv(got, src=0, group=group, tag=index)
            if not torch.equal(got.view(torch.uint8), want.view(torch.uint8)):
                wrong.append(str(dtype))
    return wrong


def mismatch(rank: int, world: int, what: str) -> dict[str, Any]:
    group = fresh(world)
    if rank == 0:
        tensor = torch.zeros(8 if what == "size" else 4, dtype=torch.float64 if what == "dtype" else torch.float32)
        request = ub_overlap.isend(tensor, group=group, group_dst=1, tag=5 if what == "tag" else 0)
        attempt(request.wait)
        dist.barrier()
        return attempt(lambda: ub_overlap.isend(tensor, group=group, group_dst=1))
    found = attempt(lambda: ub_overlap.recv(torch.zeros(4), group=group, group_src=0))
    dist.barrier()
    return found


def misuse(rank: int, world: int) -> list[dict[str, Any]]:
    group = fresh(world)
    tensor = torch.zeros(4, 4)
    found = [
        attempt(lambda: ub_overlap.isend(tensor, group=group, group_dst=rank)),
        attempt(lambda: ub_overlap.isend(tensor, group=group, group_dst=7)),
        attempt(lambda: ub_overlap.irecv(tensor.t(), group=group, group_src=1 - rank)),
        attempt(lambda: ub_overlap.irecv(tensor, group=group)),
        attempt(lambda: ub_overlap.irecv(torch.zeros(4, dtype=torch.complex64).conj(), group=group, group_src=1 - rank)),
        attempt(lambda: ub_overlap.irecv(tensor.to_sparse(), group=group, group_src=1 - rank)),
        attempt(lambda: ub_overlap.initialize_point_to_point(group, 1 << 30)),
    ]
    ub_overlap.isend(tensor + rank, group=group, group_dst=1 - rank)
    ub_overlap.recv(tensor, group=group, group_src=1 - rank)
    return [*found, {"error": "" if tensor[0, 0] == 1 - rank else "wrong", "text": ""}]


def stage_fails(rank: int, world: int, step_s: float, how: str) -> dict[str, Any]:
    """Ranks pass a tensor on, r to r + 1; rank 1 fails in the second round. Ranks have posted receives for the way back."""
    settings.configure(step_timeout_s=step_s)
    group = fresh(world)
    for turn in range(2):
        if turn == 1 and rank == 1:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if how == "drop":
                time.sleep(60)
            if how == "abort":
                ub_overlap.abort(group, reason="no more data")
        tensor = torch.zeros(4)
        back = torch.zeros(4)

        def pass_on(tensor: torch.Tensor = tensor, back: torch.Tensor = back) -> None:
            early = ub_overlap.irecv(back, group=group, group_src=rank + 1) if rank < world - 1 else None
            if rank > 0:
                ub_overlap.recv(tensor, group=group, group_src=rank - 1)
            if early is not None:
                ub_overlap.send(tensor, group=group, group_dst=rank + 1)
                early.wait()
            if rank > 0:
                ub_overlap.send(back, group=group, group_dst=rank - 1)

        found = attempt(pass_on)
        if found["error"]:
            return found
    return found


def no_receiver(rank: int, world: int, step_s: float) -> dict[str, Any]:
    """Rank 1 does not receive: the third message finds no free slot."""
    settings.configure(step_timeout_s=step_s)
    group = fresh(world, slots=2)
    if rank == 1:
        dist.barrier()
        return {}
    first = [ub_overlap.isend(torch.zeros(4), group=group, group_dst=1) for _ in range(3)]
    done = [attempt(request.wait) for request in first]
    dist.barrier()
    return {"first": [one["error"] for one in done[:2]], **done[2]}


def closed(rank: int, world: int) -> dict[str, Any]:
    """The group is destroyed while a receive waits."""
    group = fresh(world)
    request = ub_overlap.irecv(torch.zeros(4), group=group, group_src=1 - rank)
    threading.Timer(0.3, lambda: dist.destroy_process_group(group)).start()
    return attempt(request.wait)


def c10d(rank: int, world: int) -> list[str]:
    """torch.distributed's functions on a group of ub_overlap.pipeline.make_group, and which of them c10d's gloo runs."""
    group = ub_overlap.pipeline.make_group(dist.group.WORLD)
    right, left = (rank + 1) % world, (rank - 1) % world
    wrong = []
    for turn in range(3):
        out, value = torch.zeros(1000), torch.full((1000,), float(10 * turn + rank))
        ops = [
            dist.P2POp(dist.irecv, out, group=group, group_peer=left, tag=turn),
            dist.P2POp(dist.isend, value, group=group, group_peer=right, tag=turn),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
            if not work.is_completed():
                wrong.append("a work is not completed after wait")
        if not out.eq(10 * turn + left).all():
            wrong.append(f"turn {turn}: {out[0]}")
    objects = [{"rank": rank, "text": "x" * 3000}]
    if rank == 0:
        dist.send_object_list(objects, group=group, group_dst=1)
    elif rank == 1:
        dist.recv_object_list(objects, group=group, group_src=0)
        if objects[0]["rank"] != 0:
            wrong.append(str(objects))
    total, parts = torch.ones(2), torch.zeros(world)
    dist.all_reduce(total, group=group)
    dist.all_gather_into_tensor(parts, torch.tensor([float(rank)]), group=group)
    dist.barrier(group=group)
    if total.tolist() != [world] * 2 or parts.tolist() != list(range(world)):
        wrong.append(f"{total} {parts}")
    if not attempt(lambda: dist.recv(torch.zeros(1), group=group))["text"].startswith("a channel has one source"):
        wrong.append("recv from any rank was not refused")
    return wrong


def unequal_groups(rank: int, world: int) -> list[float]:
    """Groups for messages of ranks that are in different numbers of groups; the second one of the same ranks too."""
    dist.new_group([0, 1])  # rank 2 is not in it
    got = []
    for turn in range(2):
        group = ub_overlap.pipeline.make_group(dist.group.WORLD, timeout=timedelta(seconds=10))
        out = torch.zeros(1)
        sent = dist.isend(torch.full((1,), float(rank + 10 * turn)), group=group, group_dst=(rank + 1) % world)
        dist.recv(out, group=group, group_src=(rank - 1) % world)
        sent.wait()
        got.append(out.item())
    return got


def never_makes_the_group(rank: int, world: int, init_s: float, how: str) -> dict[str, Any]:
    """Rank 1 dies before it makes the group, or within. Where `how` says so, a thread of rank 0 aborts the world meanwhile."""
    settings.configure(init_timeout_s=init_s)
    if rank == 1 and how == "abort in creation":
        with mock.patch.object(_c10d_compat, "new_group_like", side_effect=lambda *_: os._exit(0)):
            ub_overlap.pipeline.make_group()
    if rank == 1:
        os._exit(0)
    if rank == 0 and how:
        threading.Timer(2.0, lambda: ub_overlap.abort(dist.group.WORLD, reason="enough")).start()
    return attempt(ub_overlap.pipeline.make_group)


def timeout_of_a_made_group(rank: int, world: int) -> dict[str, Any]:
    """Rank 1 does not call a collective of a group with a timeout of a second."""
    group = ub_overlap.pipeline.make_group(dist.group.WORLD, timeout=timedelta(seconds=1))
    found = attempt(lambda: rank == 1 or dist.all_reduce(torch.ones(1), group=group))
    dist.barrier()
    return found


def c10d_mismatch(rank: int, world: int) -> dict[str, Any]:
    group = ub_overlap.pipeline.make_group(dist.group.WORLD)
    work = dist.isend(torch.zeros(8), 1, group=group) if rank == 0 else dist.irecv(torch.zeros(4), 0, group=group)
    assert work is not None, "this rank is in the group"
    found = attempt(work.wait)
    # A send has succeeded once its data is in a slot.
    return {**found, "completed": work.is_completed(), "success": rank == 0 or work.is_success()}


def registered(rank: int, world: int) -> list[Any]:
    """The backend by its name: a dim of a mesh. Return what was received, and whether its memory ends with the group."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(
        "cpu", (world, 1), mesh_dim_names=("pp", "tp"), backend_override={"pp": ub_overlap.pipeline.BACKEND}
    )
    group = mesh["pp"].get_group()
    out, total = torch.full((2,), float(rank)), torch.ones(1)
    work = dist.isend(out, 1, group=group) if rank == 0 else dist.irecv(out, 0, group=group)
    work.wait()
    dist.all_reduce(total, group=group)
    name = group.group_name
    before = ops.load().find_channels(name, "cpu") is not None
    dist.destroy_process_group(group)
    for _ in range(100):
        if all(session.group != name for session in ops.load().sessions()):
            break
        time.sleep(0.05)
    after = any(session.group == name for session in ops.load().sessions())
    return [out.tolist(), total.item(), before, after, attempt(lambda: group.send([out], 1 - rank, 0))["error"]]


def first_messages_of_two_threads(rank: int, world: int) -> list[Any]:
    """Each of two threads issues the first message that it knows of."""
    found = []
    for _ in range(3):
        group, got, texts = dist.new_group(list(range(world))), torch.zeros(4), list[str]()
        ub_overlap.all_gather(got, group)

        def send(group: Any = group, texts: list[str] = texts) -> None:
            sent = torch.full((4,), float(rank))
            texts.append(attempt(lambda: ub_overlap.send(sent, group=group, group_dst=1 - rank))["text"])

        def receive(group: Any = group, texts: list[str] = texts, got: torch.Tensor = got) -> None:
            texts.append(attempt(lambda: ub_overlap.recv(got, group=group, group_src=1 - rank))["text"])

        threads = [threading.Thread(target=body, daemon=True) for body in (send, receive)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        found.append([got.tolist(), texts])
    return found


def setup_fails(rank: int, world: int) -> list[dict[str, Any]]:
    """Rank 1 has no memory for channels at the first message. Return the errors of that and of a later message."""

    def no_memory(**_sizes: Any) -> None:
        raise errors.ArenaError("cannot allocate shared memory")

    group, found, whole = dist.new_group(list(range(world))), [], channels.extension
    for broken in (rank == 1, False):
        channels.extension = (lambda: SimpleNamespace(ChannelSegment=no_memory)) if broken else whole
        try:
            found.append(attempt(lambda: ub_overlap.isend(torch.ones(1), group=group, group_dst=1 - rank)))
        finally:
            channels.extension = whole
        dist.barrier()
    return found


def silent_rank_without_transport(rank: int, world: int) -> list[float]:
    """Ranks of several hosts, one of which sends and receives nothing after the first message."""
    with reset():
        ops.load().testing.set_host_id(f"host{rank}:boot:1")
        group = dist.new_group(list(range(world)), timeout=timedelta(seconds=10))
        ub_overlap.initialize_point_to_point(group, 100)
        got = []
        for turn in range(3 if rank < 2 else 0):
            out = torch.full((1,), float(turn))
            if rank == 0:
                ub_overlap.send(out, group=group, group_dst=1)
            else:
                ub_overlap.recv(out.zero_(), group=group, group_src=0)
            got.append(out.item())
        return got


def other_hosts(rank: int, world: int) -> float:
    """Ranks of two hosts: c10d sends."""
    with reset():
        ops.load().testing.set_host_id(f"host{rank}:boot:1")
        group = ub_overlap.pipeline.make_group(dist.group.WORLD)
        first, second = torch.full((2,), float(rank)), torch.full((2,), float(rank))
        if ub_overlap.initialize_point_to_point(group, 100) != 0:
            return -1.0
        if rank == 0:
            dist.send(first, 1, group=group)
            ub_overlap.send(second + 5, dst=1, group=group)
        else:
            dist.recv(first, 0, group=group)
            ub_overlap.recv(second, src=0, group=group)
        return first.sum().item() + second.sum().item()


def several_slots(rank: int, world: int) -> dict[str, Any]:
    """Messages of several slots each: as many are held as of one slot, in the same memory."""
    size, messages = 20 * channels.ROUND, 3
    with mock.patch.object(channels, "PIECE_BYTES", 4 * channels.ROUND):
        group = dist.new_group(list(range(world)))
        held = [ub_overlap.initialize_point_to_point(group, size, slots=messages) for _ in range(2)]
    out = [numbers(rank, 1 - rank, i, size // 4) for i in range(messages)]
    for tensor in out:
        ub_overlap.isend(tensor, group=group, group_dst=1 - rank).wait()  # nothing was received yet
    dist.barrier()
    wrong = []
    for i in range(messages):
        got = torch.zeros(size // 4)
        ub_overlap.recv(got, group=group, group_src=1 - rank)
        if not torch.equal(got, numbers(1 - rank, rank, i, size // 4)):
            wrong.append(i)
    too_large = attempt(lambda: ub_overlap.initialize_point_to_point(group, size + 1))
    return {"held": held, "wrong": wrong, "error": too_large["error"]}
