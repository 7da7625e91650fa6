"""Store exchanges of ranks whose local exchange counts differ, through c10d's C++ as in torch's rendezvous."""

from __future__ import annotations

import threading
from datetime import timedelta

import torch.distributed as dist

from ub_overlap._recount import Recounted


def exchange(store: dist.Store, n: int, rank: int, ranks: int, found: dict[int, list[bytes]]) -> None:
    """Make the same Store calls as torch's StoreExchange: an all_gather, then a barrier."""
    store.set(f"CUDASymmetricMemory/{n}/{rank}", f"of {rank}")
    found[rank] = store.multi_get([f"CUDASymmetricMemory/{n}/{r}" for r in range(ranks)])
    key = f"CUDASymmetricMemory/{n + 1}"
    if store.add(key, 1) == ranks:
        store.set(f"{key}/last", "1")
    store.wait([f"{key}/last"], timedelta(seconds=10))


def test_ranks_with_another_past_meet_again_and_again() -> None:
    base = dist.HashStore()
    base.set_timeout(timedelta(seconds=10))
    counts = [0, 4, 11]  # earlier exchanges of each rank
    for meeting in range(3):
        kept = [Recounted(base, f"meeting {meeting}") for _ in counts]
        found: dict[int, list[bytes]] = {}
        threads = [
            # Only the C++ part reaches the peer.
            threading.Thread(target=exchange, args=(dist.PrefixStore("group", kept[rank]), n, rank, 3, found), daemon=True)
            for rank, n in enumerate(counts)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert found == {rank: [b"of 0", b"of 1", b"of 2"] for rank in range(3)}
        counts = [n + 2 for n in counts]


def test_other_keys_pass() -> None:
    base = dist.HashStore()
    kept = Recounted(base, "p")
    kept.set("plain", "1")
    assert kept.get("plain") == b"1"
    assert base.get("p/plain") == b"1"
    kept.set("a/17/x", "2")
    assert base.get("p/a/0/x") == b"2"
    kept.set("a/19", "3")
    assert base.get("p/a/2") == b"3"
    assert kept.check(["a/19"])


def test_a_process_group_hands_out_the_store() -> None:
    """A process group returns its Store as torch 2.11 looks it up: by the name of the group."""
    from torch._C import _distributed_c10d as c10d

    kept = Recounted(dist.HashStore(), "apart")
    named = c10d.ProcessGroup(kept, 1, 3)
    c10d._register_process_group("of/apart", named)
    try:
        found = c10d._resolve_process_group("of/apart")
        assert (found.rank(), found.size()) == (1, 3)
        found.get_group_store().set("a/7/1", "x")
        assert kept.get("a/7/1") == b"x"
    finally:
        c10d._unregister_process_group("of/apart")
