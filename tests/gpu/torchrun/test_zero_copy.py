"""Zero-copy gathers: late readers, also without the wait that protects them, and a peer that does not come.

tests/gpu/torchrun/test_split.py has their random orders and their CUDA graphs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.gpu.cases import BF16, Maker
from tests.gpu.lockstep import Lockstep
from tests.gpu.torchrun.test_broken_schedules import DEADLINE_S, use
from tests.gpu.torchrun.test_split import OPS, arguments, release
from ub_overlap.runtime import errors, settings
from ub_overlap.runtime.schedule.steps import Schedule, Wait
from ub_overlap.runtime.session import session


def gather(shard: torch.Tensor, group: str) -> torch.Tensor:
    """Return landing memory of slot 0."""
    own: Any = arguments("all_gather", BF16, 0, group, "zero", True)
    return OPS.finish_collective(OPS.start_collective(shard, *own), shard, *own)


def late_readers(lockstep: Lockstep, group: str, waits: bool) -> str:
    """Rank 0 reads its results late. Rank 1 waits for no data, and without `waits` not for rank 0's release either."""
    make, turns = Maker(lockstep.device, lockstep.ranks), 8
    shards = [make.randn(64, 256, dtype=BF16) for _ in range(turns)]
    expected = [OPS.bulk(x, [], [], "all_gather", "sum", BF16, "bulk", group, "zero.bulk")[0] for x in shards]

    def edit(schedule: Schedule) -> Schedule:
        if schedule.rank != 1:
            return schedule
        return replace(schedule, steps=tuple(s for s in schedule.steps if not isinstance(s, Wait) or (s.back != 0 and waits)))

    gathered = gather(shards[0], group)
    release(gathered, 0, group, "zero")
    lockstep.sync()
    lockstep.barrier()
    use(edit)
    before, results, note = settings.current().step_timeout_s, [], ""
    settings.configure(step_timeout_s=2 * DEADLINE_S)
    try:
        for shard in shards:
            gathered = gather(shard, group)
            if lockstep.rank == 0:
                lockstep.sleep_on_device(0.02)
            results.append(gathered.clone())
            release(gathered, 0, group, "zero")
        lockstep.sync()
        session.check(group)
    except errors.UbOverlapError as error:  # rank 1 runs ahead: rank 0 may clear its READY with that of the earlier call
        note = f"{type(error).__name__}: {error.what}"
    finally:
        use(None)
        settings.configure(step_timeout_s=before)
        lockstep.barrier()
    if lockstep.rank != 0:
        return ""
    wrong = sum(not torch.equal(a, b) for a, b in zip(results, expected, strict=False))
    note = note or (f"{wrong} of {turns} results are wrong" if wrong else "")
    if waits and note:
        raise AssertionError(f"with the wait for the release: {note}")
    if not waits and not note:
        raise AssertionError("missed: without the wait for the release rank 0 still reads the right numbers")
    return note or "all is well"


def peer_that_does_not_come(lockstep: Lockstep, group: str) -> str:
    """A gather that only rank 0 starts ends at its deadline, names a peer, and gives NaN."""
    shard = Maker(lockstep.device, lockstep.ranks).randn(64, 256, dtype=BF16)
    release(gather(shard, group), 0, group, "zero")
    lockstep.sync()
    lockstep.barrier()
    before, read, found = settings.current().step_timeout_s, None, None
    settings.configure(step_timeout_s=DEADLINE_S)
    try:
        if lockstep.rank == 0:
            gathered = gather(shard, group)
            read = gathered.clone()
            release(gathered, 0, group, "zero")
            lockstep.sync()
            session.check(group)
    except errors.UbOverlapError as error:
        found = error
    finally:
        settings.configure(step_timeout_s=before)
        lockstep.barrier()
    if lockstep.rank != 0:
        return ""
    if not isinstance(found, errors.PeerTimeoutError) or "zero.all_gather.0" not in str(found):
        raise AssertionError(f"expected PeerTimeoutError at zero.all_gather.0, got {found!r}")
    if read is not None and not bool(read.isnan().all()):
        raise AssertionError("the result of a failed gather is not NaN")
    return f"{type(found).__name__}, {'raised at once' if read is None else 'NaN until then'}"


@pytest.mark.parametrize("waits", [True, False])
def test_late_readers(lockstep: Lockstep, own_group: str, waits: bool) -> None:
    lockstep.note(late_readers(lockstep, own_group, waits))


def test_a_peer_that_does_not_come(lockstep: Lockstep, own_group: str) -> None:
    lockstep.note(peer_that_does_not_come(lockstep, own_group))
