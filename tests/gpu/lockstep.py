"""Lockstep: the ranks of torchrun run the same pytest tests in the same order, each with a deadline.

    torchrun --nproc-per-node 2 --local-ranks-filter 0 -m pytest tests/gpu/torchrun [--quick] [--device cpu] [-k TEXT]

A test that fails on one rank fails on all, and the next test gets a new process group: the old one is out of sync.
A test that exceeds its deadline ends the process, with its name and all stacks.
"""

# ruff: noqa: E402   the environment is set before torch is imported

from __future__ import annotations

import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

# Before torch: NVLink multicast is never used here.
for _name in ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS"):
    os.environ.setdefault(_name, "0" if _name == "NCCL_NVLS_ENABLE" else "1")

import pytest
import torch
import torch.distributed as dist

from tests.gpu.shared_gpu.backend import NAME as HOST_GLOO
from tests.gpu.shared_gpu.backend import register
from ub_overlap.runtime import ops, settings
from ub_overlap.runtime.session import session
from ub_overlap.tools.rank_process import Deadline, RankProcess

STEP_TIMEOUT_S = float(os.environ.get("UB_OVERLAP_TEST_STEP_TIMEOUT_S", "20"))


def is_under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


class Lockstep(RankProcess):
    """The state of this rank of torchrun.

    `device_type`: "cuda" or "cpu". `quick`: fewer cases, fewer iterations. `notes`: (test, measured values) for the summary.
    `shares_gpu`: ranks take turns on a GPU. For numbers, not for times.
    """

    def __init__(self, device_type: str, quick: bool) -> None:
        """With UB_OVERLAP_TEST_NCCL=0 the world has gloo only, which starts no kernel. A world of more ranks than GPUs has
        gloo over copies in host memory (tests/gpu/shared_gpu): ranks share GPUs there, which NCCL refuses."""
        self.device_type, self.quick = device_type, quick
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        cuda = device_type == "cuda"
        gpus = torch.cuda.device_count() if cuda else 0
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % gpus) if cuda else torch.device("cpu")
        self.shares_gpu = cuda and self.ranks > gpus
        has_nccl = cuda and not self.shares_gpu and os.environ.get("UB_OVERLAP_TEST_NCCL", "1") != "0"
        self.backend = "nccl" if has_nccl else f"cpu:gloo,cuda:{HOST_GLOO}" if self.shares_gpu else "gloo"
        self.notes: list[tuple[str, str]] = []
        self._test = ""
        self._group: str | None = None

    def start(self) -> None:
        """Join the world. Collective."""
        if self.cuda:
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)
        more = {"device_id": self.device} if self.backend == "nccl" else {}
        with Deadline("start", 150):
            if self.shares_gpu:
                register()
            dist.init_process_group(self.backend, timeout=timedelta(seconds=120), **more)
            self.control = dist.new_group(backend="gloo", timeout=timedelta(seconds=120))
            dist.barrier(group=self.control)
        name = torch.cuda.get_device_name() if self.cuda else "cpu"
        self.say(f"torch {torch.__version__}, {name}, {self.ranks} ranks, {ops.extension().build_info()}")

    def stop(self) -> None:
        """Close all sessions once every rank has run its tests. Collective."""
        with Deadline("end", 60):
            dist.barrier(group=self.control)
            session.close()

    def run(self, test: str, deadline_s: float, body: Callable[[], None], group: str = "") -> None:
        """Run the body of one test on all ranks. AssertionError on every rank where it failed on any.

        `group`: the process group of this test only. Its session is closed and its failures are not checked.
        """
        self._test, error = test, ""
        torch.manual_seed(self.rank)
        settings.configure(step_timeout_s=STEP_TIMEOUT_S, init_timeout_s=60, shared_gpus=self.shares_gpu)
        with Deadline(test, deadline_s):
            try:
                body()
                self.sync()
                if not group:
                    session.check()
            except pytest.skip.Exception:
                raise  # every rank skips, before any collective
            except Exception as caught:  # noqa: BLE001  every failure is shown on rank 0
                error = f"rank {self.rank}: {type(caught).__name__}: {caught}\n{traceback.format_exc()}"
            errors = [text for text in self.gather(error) if text]
        if group:
            self.close(group)
        if errors:
            if self._group is not None and not group:
                self.close(self._group)
                self._group = None
            text = "\n".join(errors)
            if self.rank == 0:  # now, not at the end of the run: the next test may end the process
                print(f"\n{test}: {text}", file=sys.__stderr__, flush=True)
            raise AssertionError(text)

    def note(self, text: Any) -> None:
        """Keep measured values of the running test for the summary of rank 0."""
        if text:
            self.notes.append((self._test, str(text)))

    def group(self) -> str:
        """Return the process group of all ranks that tests share, a new one after a failure."""
        if self._group is None:
            self._group = self.new_group()
        return self._group

    def new_group(self, ranks: list[int] | None = None, backend: str = "") -> str:
        """Make a process group and return its name. Collective over the world. Backend "gloo" is enough for our own ops."""
        made = dist.new_group(ranks, backend=backend or self.backend)
        return "" if made is dist.GroupMember.NON_GROUP_MEMBER else str(made.group_name)

    def close(self, group: str) -> None:
        """Close the session of a group in any state."""
        try:
            session.close(group, self.device_type)
        except Exception:  # noqa: BLE001  its failure has been reported by the test
            traceback.print_exc(file=sys.stderr)

    def agree(self, body: Callable[[], Any]) -> Any:
        """Return what `body` returns, or raise AssertionError on all ranks if it raised on any.

        The body holds no collective.
        """
        error, value = "", None
        try:
            value = body()
        except Exception as caught:  # noqa: BLE001  raised again, on all ranks
            error = f"{type(caught).__name__}: {str(caught).splitlines()[0] if str(caught) else ''}"
            print(f"--- rank {self.rank}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        if failures := [f"rank {rank}: {text}" for rank, text in enumerate(self.gather(error)) if text]:
            raise AssertionError("; ".join(failures))
        return value

    def barrier(self) -> None:
        dist.barrier(group=self.control)

    def sleep_on_device(self, seconds: float) -> None:
        """Keep the current stream busy for about `seconds` (on the CPU: the thread)."""
        if self.cuda:
            torch.cuda._sleep(int(seconds * 1.8e9))
        else:
            time.sleep(seconds)

    def shared_random(self, seed: int) -> random.Random:
        """Return a generator of the same numbers on all ranks."""
        return random.Random(seed)

    def own_random(self, seed: int) -> random.Random:
        """Return a generator of different numbers on each rank."""
        return random.Random(1000 * (seed + 1) + self.rank)
