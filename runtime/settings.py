"""Settings of the process: deadlines, tracing and debugging.

Each setting has a default, an environment variable UB_OVERLAP_<NAME>, and a keyword of `configure`. `describe_settings()`
returns the table.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypedDict, Unpack, get_type_hints

from .errors import OptionError
from .extension import extension
from .typed_fields import Check, check_values, integer_from, number, typed_field


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


_SECONDS = number("a finite number of seconds above 0, at most 1e9", lambda value: 0 < value <= 1e9)
_FOLDER = Check("a folder", lambda value: os.fspath(value))
_PREFIX = "UB_OVERLAP_"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Values in force in one process. OptionError for an invalid value."""

    init_timeout_s: float = typed_field(
        300.0, "seconds to wait for peers at a group's first call and at a plan's first call (peers may be compiling)", _SECONDS
    )
    step_timeout_s: float = typed_field(100.0, "seconds that one wait within a call may take", _SECONDS)
    trace: bool = typed_field(False, "keep the step times of the last call of every site")
    replay: bool = typed_field(
        True,
        "record repeated GPU calls as CUDA graphs. During a recording (0.2 ms) CUDA refuses torch.cuda.synchronize() of "
        "other threads: set 0 in programs with such threads",
    )
    nvtx: bool = typed_field(False, "NVTX ranges with site names around calls, for Nsight")
    links: Literal["nvlink", "any"] = typed_field(
        "nvlink", '"nvlink": GPUs connected over PCIe only run plain collectives; "any": they are overlapped too'
    )
    shared_gpus: bool = typed_field(
        False,
        "for tests: ranks that share a GPU overlap too, where they take turns; slow. Else they run plain collectives",
    )
    hosts: str = typed_field(
        "",
        "where the ranks of the world are: the number of ranks of each host, or one name for every rank (0,0,1,1). Ranks on "
        "different hosts share no memory, also where the machine is one: for tests. Empty: as LOCAL_WORLD_SIZE says, else one",
        Check("a text", _text),
    )
    nccl_multiprocessors: int = typed_field(
        8,
        "multiprocessors of a GPU that matmuls leave to NCCL between start and finish of a collective that it runs",
        integer_from(0),
    )
    snapshots: bool = typed_field(True, "keep each graph before and after the rewrite, for reports and errors")
    flight_calls: int = typed_field(
        256,
        "calls of each group that the flight recorder keeps, from the group's first call on; 0 turns it off",
        integer_from(0),
    )
    flight_dir: str = typed_field("", "folder of flight records; empty: `flight` in the cache folder", _FOLDER)
    flight_signal: bool = typed_field(True, "write a flight record on SIGUSR1, unless the program handles that signal")
    merge_collectives: bool = typed_field(
        True,
        "merge sums of all_reduces or reduce_scatters into one of the sum, all_gathers of one tensor into one, and steps of a "
        "ring that backward repeats into those of forward; send repeated elements once; read sorted rows where the program "
        "scatters them",
    )

    def __post_init__(self) -> None:
        def refuse(name: str, value: Any, expected: str) -> OptionError:
            where = f"ub_overlap.configure({name}=...) or {environment_name(name)}"
            return OptionError(f"bad value of setting {name!r}", where=where, got=repr(value), expected=expected)

        for name, value in check_values(Settings, {f.name: getattr(self, f.name) for f in fields(self)}, refuse).items():
            object.__setattr__(self, name, value)


class SettingValues(TypedDict, total=False):
    """The fields of Settings, for type checkers."""

    init_timeout_s: float
    step_timeout_s: float
    trace: bool
    replay: bool
    nvtx: bool
    links: Literal["nvlink", "any"]
    shared_gpus: bool
    hosts: str
    nccl_multiprocessors: int
    snapshots: bool
    flight_calls: int
    flight_dir: str | os.PathLike[str]
    flight_signal: bool
    merge_collectives: bool


def environment_name(name: str) -> str:
    """Return the environment variable of a setting."""
    return _PREFIX + name.upper()


def describe_settings() -> list[tuple[str, str, str, str]]:
    """Return (setting, environment variable, default, meaning) of each setting."""
    return [(f.name, environment_name(f.name), _as_text(f.default), f.metadata["doc"]) for f in fields(Settings)]


def from_environment() -> Settings:
    """Return the settings of the environment, and defaults for variables that are not set."""
    types = get_type_hints(Settings)
    texts = {name: text for name in types if (text := os.environ.get(environment_name(name), ""))}
    return Settings(**{name: _from_text(environment_name(name), text, types[name]) for name, text in texts.items()})


def _from_text(variable: str, text: str, kind: Any) -> Any:
    if kind is bool:
        return text != "0"
    if kind not in (int, float):
        return text
    try:
        return kind(text)
    except ValueError:
        expected = "seconds, e.g. 100" if kind is float else "an integer"
        raise OptionError(f"{variable} is not a number", got=repr(text), expected=expected) from None


def _as_text(default: Any) -> str:
    """Return a default as the environment spells it."""
    return str(int(default)) if isinstance(default, bool) else f"{default:g}" if isinstance(default, float) else str(default)


class _Holder:
    """The settings of this process. C++ keeps a copy of those that it reads, pushed by `apply`."""

    settings: Settings | None = None
    configured: frozenset[str] = frozenset()
    """Settings that `configure` changed: their environment variables no longer count."""


def current() -> Settings:
    """Return the settings in force in this process."""
    if _Holder.settings is None:
        _Holder.settings = from_environment()
    return _Holder.settings


def advise(name: str) -> str:
    """Return how to raise a setting, for errors: by what set it last."""
    if name in _Holder.configured:
        now = getattr(current(), name)
        return f"raise {name} where ub_overlap.configure(...) sets it, to {now:g} ({environment_name(name)} is ignored)"
    return f"raise {environment_name(name)}"


def configure(**changes: Unpack[SettingValues]) -> Settings:
    """Change settings of this process by name, from now on. Return the settings then in force.

    They hold for all groups and models. A wait has the deadline that is in force when it begins.
    OptionError for an unknown name or an invalid value; nothing changes then.
    """
    unknown = sorted(set(changes) - set(Settings.__slots__))
    if unknown:
        near = difflib.get_close_matches(unknown[0], Settings.__slots__, n=2)
        raise OptionError(
            f"unknown setting {unknown[0]!r}",
            expected=f"one of {', '.join(Settings.__slots__)}",
            fix=f"did you mean {' or '.join(near)}?" if near else "",
        )
    _Holder.settings = replace(current(), **changes)  # type: ignore[arg-type]  (Settings converts them)
    _Holder.configured |= changes.keys()
    apply()
    return _Holder.settings


def keep(settings: Settings) -> None:
    """Put `settings` in force without C++, for programs that make decisions and run no calls."""
    _Holder.settings = settings


def apply() -> None:
    """Push the settings in force to C++."""
    c = extension()
    c.set_step_timeout(current().step_timeout_s)
    c.set_flight_calls(current().flight_calls)
    c.set_trace(current().trace)
    c.set_replay(current().replay)
    c.set_nvtx(current().nvtx)
    c.set_nccl_multiprocessors(current().nccl_multiprocessors)
