"""The search for algorithms of matmuls. tests/gpu/test_matmul_algorithms.py runs
test_search*, then test_stored* in new processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.gpu import cases
from tests.gpu.cases import Maker, differs
from tests.gpu.lockstep import Lockstep
from ub_overlap.runtime.extension import extension
from ub_overlap.runtime.matmul_algorithms import gpu, loading, search, store, tuning
from ub_overlap.runtime.session import session

KINDS = ("AG", "RS", "RS direct", "AR", "SAG", "SRS")
SIZE = 1024


@pytest.fixture(autouse=True)
def _needs_gpu(lockstep: Lockstep) -> None:
    if not lockstep.cuda:
        pytest.skip("algorithms are those of cuBLASLt")


def call_of(lockstep: Lockstep, group: str, kind: str) -> Callable[[], list[torch.Tensor]]:
    """Return a call with the same operands in every process."""
    torch.manual_seed(7 + lockstep.rank)
    case, strategy = Maker(lockstep.device, lockstep.ranks).kind(kind, SIZE)
    return lambda: cases.run_op(case, strategy, group, f"algorithms.{kind}")


def keys_of(call: Callable[[], Any]) -> dict[str, bool]:
    """Return the keys of a call's matmuls, and whether a search has chosen their algorithm."""
    device = gpu.MatmulGpu()
    before = device.problems()
    with tuning.without_replay():
        call()
    used = {problem.key for problem in search.used_since(before, device.problems())}
    return {key: has for key, _, _, has, *_ in extension().matmul_problems() if key in used}


def is_equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return not bool(differs(first, second))


def is_close(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    pairs = [(a.float(), b.float()) for a, b in zip(first, second, strict=True)]
    return all(bool((a - b).norm() <= 0.02 * b.norm()) for a, b in pairs)


@pytest.mark.deadline(120)
@pytest.mark.parametrize("kind", KINDS)
def test_search_is_used_by_all_ranks_and_stored(lockstep: Lockstep, group: str, kind: str) -> None:
    call = call_of(lockstep, group, kind)
    first = [call() for _ in range(4)][-1]  # recorded by now: a replay must not keep the first proposal
    device = gpu.MatmulGpu()
    chosen = tuning.tune_call(device, device.device, device.library(), call, lockstep.gather, write=lockstep.rank == 0)
    assert chosen and len({str(sorted(rank)) for rank in lockstep.gather({k: c.algorithm for k, c in chosen.items()})}) == 1
    keys = keys_of(call)
    assert keys and all(keys.values()), keys
    second = [call() for _ in range(4)]
    lockstep.sync()
    session.check(group)
    assert all(is_equal(outs, second[0]) for outs in second)
    assert is_close(second[0], first)
    lockstep.barrier()
    stored = store.load(device.library())
    assert all(stored[key].algorithm == choice.algorithm for key, choice in chosen.items())
    lockstep.say(*(str(choice) for choice in chosen.values()))


@pytest.mark.deadline(120)
@pytest.mark.parametrize("kind", KINDS)
def test_search_refused_algorithms_fall_back(lockstep: Lockstep, group: str, kind: str) -> None:
    call = call_of(lockstep, group, kind)
    loading.forget()
    keys, first = keys_of(call), call()
    assert keys and not any(keys.values())
    device = torch.cuda.current_device()
    for damaged in (b"short", bytes(64), b"\xff" * 64):
        extension().add_matmul_algorithms(device, dict.fromkeys(keys, damaged))
        assert not any(keys_of(call).values()), "the library accepts a damaged algorithm"
        assert is_equal(call(), first)
    loading.forget()
    session.check(group)


@pytest.mark.deadline(120)
def test_search_keeps_its_operands(lockstep: Lockstep, group: str) -> None:
    """Memory that is allocated between two timings is not that of the operands: all proposals give the same result."""
    call_of(lockstep, group, "AG")()
    device = gpu.MatmulGpu()
    for problem in [p for p in device.problems() if not p.stores_at_peers][:4]:
        proposals = device.propose(problem.key, 4)
        run = device.prepare(problem, proposals)
        sizes = [size for _, _, size, _ in problem.buffers]
        for index in range(len(proposals)):
            held = [torch.full((size // 4 + 1,), float("nan"), device=lockstep.device) for size in sizes]
            assert run(index) < float("inf"), problem.text
            del held


@pytest.mark.deadline(120)
@pytest.mark.parametrize("kind", KINDS)
def test_stored_algorithms_are_used_by_a_new_process(lockstep: Lockstep, group: str, kind: str) -> None:
    """Runs behind the search, in new processes with the same cache folder."""
    call = call_of(lockstep, group, kind)
    call()
    stored = store.load(gpu.MatmulGpu().library())
    keys = keys_of(call)
    assert keys and set(keys) <= set(stored) and all(keys.values())
    session.check(group)
