"""The runtime's settings: deadlines and tracing.

=======================  ==============================  =======  =====================================================
setting                  environment                     default  meaning
=======================  ==============================  =======  =====================================================
init_timeout_s           UB_OVERLAP_INIT_TIMEOUT_S       300      how long to wait for peers at a group's first call and
                                                                  at the first call of a plan (they may be compiling)
step_timeout_s           UB_OVERLAP_STEP_TIMEOUT_S       100      how long one wait within a call may take
trace                    UB_OVERLAP_TRACE                0        keep the step times of every site's last call
replay                   UB_OVERLAP_REPLAY               1        record calls on GPUs that come again as graphs of ours;
                                                                  while one is recorded (0.2 ms), CUDA refuses another
                                                                  thread's torch.cuda.synchronize(): 0 where a program
                                                                  has threads that do that beside ours
nvtx                     UB_OVERLAP_NVTX                 0        NVTX ranges with site names around calls, for Nsight
links                    UB_OVERLAP_LINKS                nvlink   "nvlink": GPUs that reach each other over PCIe only
                                                                  run plain collectives; "any" takes them too
=======================  ==============================  =======  =====================================================
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import Any

from .errors import OptionError
from .extension import extension


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    init_timeout_s: float = 300.0
    step_timeout_s: float = 100.0
    trace: bool = False
    replay: bool = True
    nvtx: bool = False
    links: str = "nvlink"

    def __post_init__(self) -> None:
        for name in ("init_timeout_s", "step_timeout_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
                raise OptionError(f"{name} is not a deadline", got=repr(value), expected="a finite number of seconds above 0")
            if value > 1e9:
                raise OptionError(f"{name} is too long", got=repr(value), expected="at most 1e9 seconds")
        if self.links not in ("nvlink", "any"):
            raise OptionError("links is unknown", got=repr(self.links), expected="'nvlink' or 'any'")


def from_environment() -> Settings:
    """The settings that the environment asks for, defaults elsewhere."""

    def seconds(name: str, default: float) -> float:
        text = os.environ.get(name, "")
        try:
            return float(text) if text else default
        except ValueError:
            raise OptionError(f"{name} is not a number", got=repr(text), expected="seconds, e.g. 100") from None

    return Settings(
        init_timeout_s=seconds("UB_OVERLAP_INIT_TIMEOUT_S", Settings().init_timeout_s),
        step_timeout_s=seconds("UB_OVERLAP_STEP_TIMEOUT_S", Settings().step_timeout_s),
        trace=os.environ.get("UB_OVERLAP_TRACE", "0") not in ("", "0"),
        replay=os.environ.get("UB_OVERLAP_REPLAY", "1") not in ("", "0"),
        nvtx=os.environ.get("UB_OVERLAP_NVTX", "0") not in ("", "0"),
        links=os.environ.get("UB_OVERLAP_LINKS") or Settings().links,
    )


class _Holder:
    """What is in force in this process. C++ keeps a copy of what it needs, pushed by `apply`."""

    settings: Settings | None = None


def current() -> Settings:
    if _Holder.settings is None:
        _Holder.settings = from_environment()
    return _Holder.settings


def configure(**changes: Any) -> Settings:
    """Change settings by name for this process, from now on. Returns what is then in force."""
    unknown = sorted(set(changes) - set(Settings.__slots__))
    if unknown:
        raise OptionError(f"unknown setting {unknown[0]!r}", expected=f"one of {', '.join(Settings.__slots__)}")
    _Holder.settings = replace(current(), **changes)
    apply()
    return _Holder.settings


def apply() -> None:
    """Push the settings in force to C++."""
    c = extension()
    c.set_step_timeout(current().step_timeout_s)
    c.set_trace(current().trace)
    c.set_replay(current().replay)
    c.set_nvtx(current().nvtx)
