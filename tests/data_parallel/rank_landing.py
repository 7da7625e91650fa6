"""Rank functions of test_fsdp.py: results of gathers in landing memory, and ranks that keep one or die in a gather."""

from __future__ import annotations

import inspect
import os
import random
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import ub_overlap
from tests.runtime.rank_failures import attempt
from tests.runtime.rank_sessions import C, reset
from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.joint.scatter_first import mesh_signature
from ub_overlap.runtime import settings
from ub_overlap.runtime.data_parallel.eager_collectives import OPS, gather_into
from ub_overlap.runtime.data_parallel.landing_slots import LandingSlots
from ub_overlap.runtime.data_parallel.served_groups import ServedGroups
from ub_overlap.runtime.functional import initialize_group

from .rank_fsdp import comms, sharded, train


def landing_memory(rank: int, world: int, steps: int) -> list[str]:
    """Results that live for random times, with delays: each stays as it is until it is dropped; then its slot is free.

    Return what is wrong. More results than slots get none, and neither does one whose view lives on.
    """
    name = dist.new_group(list(range(world))).group_name
    initialize_group(name, 1, device="cpu")
    slots, order, bad = LandingSlots.of(name, torch.device("cpu")), random.Random(3), []
    held: list[tuple[Tensor, Tensor]] = []
    full = 0
    with reset():
        C.testing.set_random_delay(300, 7 * rank)
        for step in range(steps):
            if held and order.random() < 0.4:
                out, want = held.pop(order.randrange(len(held)))
                if not torch.equal(out, want):
                    bad.append(f"changed before step {step}")
                if order.random() < 0.3:
                    held.append((out[1:], want[1:]))  # the view keeps the slot
                del out
                continue
            dtype, count = (
                order.choice((torch.float32, torch.bfloat16, torch.int64, torch.uint8)),
                order.choice((3, 5000, 70_000)),
            )
            out = slots.allocate(count * world, dtype, "/landing")
            if (out is None) != (len(held) == 4):
                bad.append(f"{len(held)} results at step {step}")
            if out is None:
                full += 1
                continue
            parts = [((torch.arange(count) * (r + 2) + step) % 113).to(dtype) for r in range(world)]
            own = out[count * rank : count * (rank + 1)]
            own.copy_(parts[rank])
            if not slots.gather(out, own, "/landing"):
                bad.append(f"not gathered in place at step {step}")
            del own
            held.append((out, torch.cat(parts)))
            del out
    bad += ["at the end" for out, want in held if not torch.equal(out, want)]
    held.clear()
    slots.release_free()
    bad += [] if full else ["never full"]
    token = OPS.start_collective(
        torch.ones(2), "all_gather", "sum", torch.float32, 0, False, "bulk", name, "/other"
    )  # was released
    OPS.finish_collective(token, torch.ones(2), "all_gather", "sum", torch.float32, 0, False, "bulk", name, "/other")
    return bad[:5]


def uses_landing_memory(rank: int, world: int) -> list[str]:
    """A forward has two results at once, each in landing memory. Removal frees the slots; models follow each other."""
    bad = []
    mesh = DeviceMesh.from_group(dist.new_group(list(range(world))), "cpu")
    slots = None
    for _ in range(2):
        model = sharded(mesh=mesh)
        installation = ub_overlap.fsdp.install(model)
        train(model, rank)
        (own_group,) = installation._groups.own_groups()
        slots = LandingSlots.of(own_group, torch.device("cpu"))
        used = [slot.number for slot in slots._slots if slot.bytes]
        if used != [0, 1]:
            bad.append(f"slots {used}")
    installation.remove()
    bad += [f"slot {slot.number} is open" for slot in slots._slots if slot.site] if slots else ["no slots"]
    return bad


def keeps_a_result(rank: int, world: int, step_s: float) -> dict[str, Any]:
    """Rank 1 keeps a result, so it chooses another slot than rank 0 from then on."""
    settings.configure(step_timeout_s=step_s)
    model = sharded()
    ub_overlap.fsdp.install(model)
    kept = []
    if rank == 1:
        gather, _ = comms(model)[:2]
        whole = gather.__class__.__call__

        class Keeps(gather.__class__):  # type: ignore[misc,name-defined]
            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                kept.append(kwargs["output_tensor"])
                return whole(self, *args, **kwargs)

        gather.__class__ = Keeps
    return attempt(lambda: train(model, rank))


def dies_in_gather(rank: int, world: int, step_s: float) -> dict[str, Any]:
    """The last rank ends inside the second step's first gather."""
    settings.configure(step_timeout_s=step_s)
    model = sharded()
    ub_overlap.fsdp.install(model)
    train(model, rank, steps=1)
    if rank == world - 1:
        gather, _ = comms(model)[:2]
        model.set_custom_all_gather(_Dies(gather))
    return attempt(lambda: train(model, rank, steps=2))


class _Dies:
    def __init__(self, gather: Any) -> None:
        self.allocate = gather.allocate

    def __call__(self, **_: Any) -> None:
        os._exit(0)


def own_groups(rank: int, world: int) -> dict[str, Any]:
    """The group of ours for a user's group whose ranks are in another order, and in different numbers of groups."""
    dist.new_group([0, 1])  # rank 2 is not in it
    order = [2, 0, 1]
    unsorted = {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}
    group: Any = dist.new_group(order, **unsorted)
    served, device = ServedGroups("test"), torch.device("cpu")
    name = served.serve(group, device)
    out = torch.zeros(world)
    gather_into(out, torch.full((1,), float(group.rank())), name, "/own")
    found: dict[str, Any] = {"gathered": out.tolist(), "again": served.serve(group, device) == name}
    dist.barrier()
    dist.destroy_process_group(group)  # `group` still refers to it
    deadline = time.monotonic() + 10
    while any(session.group == name for session in C.sessions()) and time.monotonic() < deadline:
        time.sleep(0.05)
    found["left"] = served.own_groups()
    found["signed"] = any(text.startswith(f"{name}:") for text in mesh_signature())  # c10d does not resolve the name any more
    found["freed"] = all(session.group != name for session in C.sessions())
    found["next"] = ServedGroups("test").serve(dist.new_group(list(range(world))), device) not in ("", name)
    found["destroyed"] = name not in (one.group_name for one in compat.process_groups())
    return found
