"""What every program of this folder is made of: ranks of torchrun, rows that check themselves, deadlines, one table last.

    def main() -> int:
        with Frame("what it does") as frame:
            frame.row("a case", lambda group: "a note")     # raises: FAIL on all ranks; a string or a Result: the row's note
        return frame.code

A row runs in step on all ranks. One that outlasts its deadline ends the program, with the table so far. After a row that failed
the next one gets a new group, for the old one is out of step. `--device cpu` runs the same rows over gloo and shared memory.
"""

# ruff: noqa: E402   the environment comes before torch

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

# Before torch: NVLink multicast is never used here.
for _name in ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS"):
    os.environ.setdefault(_name, "0" if _name == "NCCL_NVLS_ENABLE" else "1")

import torch
import torch.distributed as dist

from ub_overlap.runtime import ops, settings
from ub_overlap.runtime.session import session
from ub_overlap.tools.rank_process import Deadline, Member, leave

TABLE = "== "
"""Begins the line above the table, by which run_all.py finds it."""


@dataclass(frozen=True)
class Result:
    """How a row ended that did not raise. `word`: "ok", "close", "skip", a time; only FAIL and HANG are bad."""

    word: str
    note: str = ""


class Skip(Exception):
    """Raised by a body, on all ranks alike: there is nothing to run here. The text says why."""


def options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The options that all programs take."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="fewer rows, fewer iterations")
    parser.add_argument("--only", default="", help="run the rows whose name contains this")
    return parser


def text_table(title: str, rows: list[tuple[str, str, str]]) -> str:
    width = max([len(row[0]) for row in rows], default=10)
    word = max([6, *(len(row[1]) for row in rows)])
    bad = sum(row[1] in ("FAIL", "HANG") for row in rows)
    lines = [f"{TABLE}{title}: {bad} of {len(rows)} rows are bad", f"{'case':<{width}}  {'result':<{word}}  notes"]
    return "\n".join([*lines, "-" * (width + word + 30), *(f"{a:<{width}}  {b:<{word}}  {c}" for a, b, c in rows)])


class Frame(Member):
    """One program on all ranks of torchrun. `code`: its exit code, 1 where a row is bad."""

    def __init__(
        self, title: str, parser: argparse.ArgumentParser | None = None, step_timeout_s: float = 20, nccl: bool = True
    ) -> None:
        """`nccl`: the world's own collectives run on GPUs too (without it: gloo alone, which starts no kernel)."""
        self.title = title
        self.rank, self.ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.options = options(parser or argparse.ArgumentParser(description=title)).parse_args()
        self.kind: str = self.options.device
        cuda = self.kind == "cuda"
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
        self.backend = "nccl" if cuda and nccl else "gloo"
        self.rows: list[tuple[str, str, str]] = []
        self._began = time.monotonic()
        self._timeout_s = step_timeout_s
        self._group: str | None = None

    def __enter__(self) -> Frame:
        if self.cuda:
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)
        more = {"device_id": self.device} if self.backend == "nccl" else {}
        with self.deadline("start", 150):
            dist.init_process_group(self.backend, timeout=timedelta(seconds=120), **more)
            self.control = dist.new_group(backend="gloo", timeout=timedelta(seconds=120))
            dist.barrier(group=self.control)
        torch.manual_seed(self.rank)
        settings.configure(step_timeout_s=self._timeout_s, init_timeout_s=60)
        name = torch.cuda.get_device_name() if self.cuda else "cpu"
        self.say(f"{self.title}: torch {torch.__version__}, {name}, {self.ranks} ranks, {ops.extension().build_info()}")
        return self

    def __exit__(self, kind: object, error: object, _: object) -> None:
        if error is not None:
            traceback.print_exc()
            print(f"rank {self.rank}: the program itself failed", file=sys.stderr, flush=True)
            self.rows.append(("the program itself", "FAIL", repr(error)[:200]))
        self.say(text_table(f"{self.title}, {self.ranks} ranks, {time.monotonic() - self._began:.0f} s", self.rows))
        if error is not None:
            leave(1)
        with self.deadline("end", 60):
            dist.barrier(group=self.control)
            with contextlib.suppress(Exception):  # a failed group's device work has been told of in its row
                session.close()
        leave(self.code)

    @property
    def code(self) -> int:
        return int(any(row[1] in ("FAIL", "HANG") for row in self.rows))

    def deadline(self, name: str, seconds: float) -> Deadline:
        return Deadline(name, seconds, lambda: self._hung(name))

    def _hung(self, name: str) -> None:
        self.rows.append((name, "HANG", f"rank {self.rank}"))
        if self.rank == 0:
            print(text_table(self.title, self.rows), flush=True)
        else:
            time.sleep(3)  # the first rank has the table, and torchrun ends all when one ends

    def device_sleep(self, seconds: float) -> None:
        """Keeps the current stream busy for about so long (on the CPU: the thread)."""
        if self.cuda:
            torch.cuda._sleep(int(seconds * 1.8e9))
        else:
            time.sleep(seconds)

    def group(self) -> str:
        """The group of all ranks that rows share; a new one after a failure."""
        if self._group is None:
            self._group = self.fresh()
        return self._group

    def fresh(self, ranks: list[int] | None = None, backend: str = "") -> str:
        """A new group's name; collective over the world. backend "gloo": enough for our ops, and quickly made."""
        made = dist.new_group(ranks, backend=backend or self.backend)
        return "" if made is dist.GroupMember.NON_GROUP_MEMBER else str(made.group_name)

    def together(self, body: Callable[[], Any]) -> Any:
        """What `body` returns, or an AssertionError on all ranks where it raised on any: what follows may be a collective. The
        body itself holds none."""
        error, found = "", None
        try:
            found = body()
        except Exception as caught:  # noqa: BLE001  raised again, on all ranks
            error = f"{type(caught).__name__}: {str(caught).splitlines()[0] if str(caught) else ''}"
            print(f"--- rank {self.rank}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        if bad := [f"rank {rank}: {text}" for rank, text in enumerate(self.gather(error)) if text]:
            raise AssertionError("; ".join(bad))
        return found

    def barrier(self) -> None:
        dist.barrier(group=self.control)

    def row(self, name: str, body: Callable[[str], Any], seconds: float = 60, own: bool = False) -> None:
        """`own`: the body leaves its group broken on purpose, and gets one to itself (over gloo)."""
        if self.options.only not in name:
            return
        clock = time.monotonic()
        error, result = "", Result("ok")
        with self.deadline(name, seconds):
            group = self.fresh(backend="gloo") if own else self.group()
            try:
                found = body(group)
                result = found if isinstance(found, Result) else Result("ok", str(found or ""))
                self.sync()
                if not own:
                    session.check()
            except Skip as why:
                result = Result("skip", str(why))
            except Exception as caught:  # noqa: BLE001  any error is a row
                error = f"rank {self.rank}: {type(caught).__name__}: {str(caught).splitlines()[0] if str(caught) else ''}"
                print(f"--- {name}, rank {self.rank}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            all_found = self.gather((error, result))
        bad = [text for text, _ in all_found if text]
        if bad:
            self.rows.append((name, "FAIL", "; ".join(bad)[:400]))
        else:
            other = [r for _, r in all_found if r.word != "ok"]
            self.rows.append((name, *((other[0].word, other[0].note) if other else (result.word, result.note))))
        self.say(f"[{time.monotonic() - self._began:5.1f} s, {time.monotonic() - clock:4.1f}] {self.rows[-1]}")
        if bad or own:
            with contextlib.suppress(Exception):
                session.close(group, self.kind)
        if bad and not own:
            self._group = None

    def shared_random(self, seed: int) -> random.Random:
        """The same numbers on all ranks."""
        return random.Random(seed)

    def own_random(self, seed: int) -> random.Random:
        """Other numbers on each rank."""
        return random.Random(1000 * (seed + 1) + self.rank)
