"""Schedules: the steps of every rank for one strategy, as data that is proven before it runs.

Builders (`build`) write schedules in the language of `steps.py`. The checker (`check`, `check_reuse`, ...) proves them with
happens-before over all ranks. `provide` returns proven schedules to C++. `describe` draws them. `interpret.py` is the
reference executor that the checker is tested against. Plain Python: nothing here imports torch.
"""

from __future__ import annotations

from .builders import build, build_all
from .checker import check, check_interleaved, check_pair, check_released, check_reuse, check_sequence, check_skip
from .describe import describe
from .encode import decode, encode, prove_pair, provide
from .schedule_error import ScheduleError
from .steps import Key, Schedule

__all__ = [
    "Key",
    "Schedule",
    "ScheduleError",
    "build",
    "build_all",
    "check",
    "check_interleaved",
    "check_pair",
    "check_released",
    "check_reuse",
    "check_sequence",
    "check_skip",
    "decode",
    "describe",
    "encode",
    "prove_pair",
    "provide",
]
