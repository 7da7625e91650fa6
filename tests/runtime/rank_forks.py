"""Rank functions of test_forks.py. They import ub_overlap late: a child may be forked before its parent did."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

SEED_OF_CHILD = 500


def _run_in_child(body: Callable[[], Any]) -> Any:
    """Return the result of `body` in a forked child, or its error as [type, text]."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            result = body()
        except Exception as error:  # noqa: BLE001  (reported to the test)
            result = [type(error).__name__, str(error)]
        os.write(send, json.dumps(result).encode())
        os._exit(0)
    os.close(send)
    with os.fdopen(receive) as pipe:
        result = pipe.read()
    os.waitpid(child, 0)
    return json.loads(result)


def _gather(rank: int, world: int, seed: int = 0, strategy: str = "pipelined") -> list[str]:
    from . import rank_ops, rank_sessions

    return rank_sessions.gather(rank_ops.group(), rank, world, 4, seed=seed, strategy=strategy)


def _join(port: int, rank: int, world: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    dist.init_process_group("gloo", store=dist.PrefixStore("child", store), rank=rank, world_size=world)


def before_the_first_op(rank: int, world: int, imported: str, strategy: str) -> Any:
    """The child of rank 1 calls an op before any rank has called one. Rank 0 waits in its first call meanwhile."""
    if imported:
        importlib.import_module(imported)
    child = _run_in_child(lambda: _gather(rank, world, SEED_OF_CHILD, strategy)) if rank == 1 else None
    return child, _gather(rank, world)


def own_group(rank: int, world: int, destroy_first: bool) -> Any:
    """The children replace the group that they inherited, or create the first one; the parents then go on."""
    importlib.import_module("ub_overlap")
    store = dist.distributed_c10d._get_default_store()
    port = store.underlying_store.port if hasattr(store, "underlying_store") else store.port
    if destroy_first:
        dist.destroy_process_group()

    def body() -> Any:
        if not destroy_first:
            dist.destroy_process_group()
        _join(port, rank, world)
        return _gather(rank, world, SEED_OF_CHILD)

    child = _run_in_child(body)
    return child, [] if destroy_first else _gather(rank, world)


def data_loader(rank: int, world: int) -> Any:
    """Forked workers of a DataLoader run before the first op and after it."""
    importlib.import_module("ub_overlap.runtime.ops")
    loader = torch.utils.data.DataLoader(range(8), batch_size=2, num_workers=1, multiprocessing_context="fork")
    bad = [] if sum(int(batch.sum()) for batch in loader) == 28 else ["batches differ"]
    bad += _gather(rank, world)
    bad += [] if sum(int(batch.sum()) for batch in loader) == 28 else ["batches differ"]
    return bad + _gather(rank, world)


def check_errors_in_child(rank: int, world: int) -> Any:
    """A child may ask for errors: it has no sessions, and sees none of its parent's memory."""
    import ub_overlap

    _gather(rank, world)
    return _run_in_child(lambda: ub_overlap.check_errors()), _gather(rank, world)


def abort_in_child(rank: int, world: int) -> Any:
    """A child aborts the group that it inherited, by name and with all groups, before any rank has called an op."""
    import ub_overlap

    from . import rank_ops

    def body() -> Any:
        ub_overlap.abort()
        return ub_overlap.abort(rank_ops.group())

    child = _run_in_child(body) if rank == 1 else None
    dist.barrier()
    return child, _gather(rank, world)
