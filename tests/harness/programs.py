"""Programs of users on CPU ranks, as torchrun starts them, forked from the servers of processes.py.

    finished = run_program(2, "benchmarks.ops", ["--device", "cpu"])      python -m benchmarks.ops, on 2 ranks
    finished = run_program(2, ROOT / "examples/tp_mlp.py")

Each rank of a torchrun imports torch, and so does torchrun: 5 s of CPU for each. Tests of benchmarks.ops, of
calibrate, and of examples/tp_mlp.py and layer_with_overlap.py use torchrun itself.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.gpu.launch import Finished
from tests.harness.processes import kill_process, start_process
from tests.harness.program_process import run_as_main
from tests.harness.ranks import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
GRACE_S = 5.0
"""For the other ranks, once one has failed."""


def run_program(
    ranks: int,
    program: str | Path,
    arguments: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    folder: Path = ROOT,
    limit_s: float = PATIENCE_S,
    only_rank_0: bool = False,
) -> Finished:
    """Run a module (its name) or a script (its path) on `ranks` ranks that find each other as under torchrun.

    `folder`: the working directory. `only_rank_0`: leave out the output of the others. The exit code is that of the first rank
    that failed, None where `limit_s` was not enough.
    """
    import torch.distributed as dist

    began = time.monotonic()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        **os.environ, **(env or {}), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RUN_ID": "tests",
    }  # fmt: skip
    with tempfile.NamedTemporaryFile("r", errors="replace") as output:
        processes: list[BaseProcess] = []
        try:
            for rank in range(ranks):
                path = os.devnull if rank and only_rank_0 else output.name
                work = (str(program), isinstance(program, Path), [*arguments], str(folder), path)
                environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(start_process(rank, run_as_main, work, environment))
            code = _wait(processes, began + limit_s)
        finally:
            for process in processes:
                kill_process(process)
        return Finished(f"{program} {' '.join(arguments)}", code, output.read(), time.monotonic() - began)


def _wait(processes: Sequence[BaseProcess], deadline: float) -> int | None:
    """Return the first exit code that is not 0 once all have ended, or after GRACE_S."""
    code = 0
    running = {process.sentinel: process for process in processes}
    while running:
        ended = wait(list(running), max(0.0, deadline - time.monotonic()))
        if not ended:
            return code or None
        for sentinel in ended:
            process = running.pop(sentinel)  # type: ignore[call-overload]
            process.join()
            if process.exitcode and not code:
                code, deadline = process.exitcode, min(deadline, time.monotonic() + GRACE_S)
    return code
