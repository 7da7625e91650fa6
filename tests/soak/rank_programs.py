"""Rank function of the soak: a batch of training steps of a program (steps.py), each compared with fp64 on one process."""

from __future__ import annotations

import functools
import random
import time
from typing import Any

import torch
import torch.distributed as dist

from ub_overlap.runtime import errors, ops, settings

from .resources import measure_resources
from .steps import HOSTS, PROGRAMS, ROWS, WIDTH, Program

C = ops.extension()
RATE = 0.05
"""Of the optimizer."""
ALLOWED = 1e-5
"""Largest error of updated parameters, relative to the largest of each."""

_program = functools.cache(lambda name: PROGRAMS[name](torch.device("cpu")))  # once in a process


def run_steps(rank: int, world: int, name: str, seed: int, first: int, count: int, sabotage: int) -> dict[str, Any]:
    """Run steps first .. first + count - 1 of the soak `seed`. Results and `sabotage` are those of rank_soak.run_batch.

    Each step begins with parameters and a batch drawn from its number, so any step can be replayed alone.
    """
    settings.configure(step_timeout_s=60.0, init_timeout_s=60.0, hosts=HOSTS.get(name, ""))
    program, bad, is_broken = _program(name), [], False
    for number in range(first, first + count):
        rng = random.Random(f"{seed}/{number}/{rank}")
        C.testing.set_random_delay(rng.choice((0, 0, 0, 300, 2000)), seed + number + rank)
        time.sleep(0.02 * rng.random() if rng.random() < 0.15 else 0.0)
        try:
            wrong = run_step(program, seed, number, spoils=number == sabotage and rank == world - 1)
        except errors.UbOverlapError as error:
            wrong, is_broken = f"{type(error).__name__}: {error}", True
        finally:
            C.testing.set_random_delay(0, 0)
        bad += [(number, f"step {number} of {name}: {wrong}")] if wrong else []
        if is_broken:
            break
    return {"bad": bad, "broken": is_broken, "resources": measure_resources(first + count)}


def run_step(program: Program, seed: int, number: int, spoils: bool = False) -> str:
    """Run one step with its update, and return which parameters are wrong, or "". `spoils`: change a gradient before."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + number)
    wholes = [torch.randn(*size, generator=generator) / 4 for size in program.sizes]
    x = torch.randn(ROWS * dist.get_world_size(), WIDTH, generator=generator)
    for own, part in zip(program.local(), program.parts(wholes), strict=True):
        own.copy_(part)
    optimizer = torch.optim.SGD(program.parameters, lr=RATE, foreach=False)
    optimizer.zero_grad()
    program.run(x)
    if spoils:
        program.parameters[0].grad.mul_(1.01)  # type: ignore[union-attr]
    optimizer.step()
    exact = [whole.double().requires_grad_() for whole in wholes]
    gradients = torch.autograd.grad(program.loss(exact, x.double()), exact)
    updated = program.parts([whole.detach() - RATE * grad for whole, grad in zip(exact, gradients, strict=True)])
    pairs = enumerate(zip(program.local(), updated, strict=True))
    found = [(i, ((own - right).abs().max() / right.abs().max()).item()) for i, (own, right) in pairs]
    return ", ".join(f"parameter {i} has error {error:.1e}" for i, error in found if not error <= ALLOWED)
