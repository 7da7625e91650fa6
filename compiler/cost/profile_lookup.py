"""Select the profile that a compilation uses."""

from __future__ import annotations

import contextlib
import logging
import math
from functools import lru_cache
from pathlib import Path

from ub_overlap.runtime import machine, profile_store
from ub_overlap.runtime.errors import OptionError
from ub_overlap.runtime.stored_file import read_bytes

from .profile import ComputeModel, Profile

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent / "profiles"
_BY_GPU = (("H200", "h200"), ("H100", "h100"), ("H800", "h100"))
"""Part of a GPU's name -> the shipped profile that is nearest to it. An H800 has less NVLink bandwidth than an H100."""
_GENERATIONS = {(8, 0): (2.2, 230.0, 1500.0), (9, 0): (5.45, 385.0, 3800.0), (10, 0): (11.0, 750.0, 6500.0)}
"""Compute capability -> TFLOP/s of bf16 a multiprocessor, GB/s to a peer, GB/s of memory; as these GPUs come, not measured."""


def shipped() -> list[str]:
    """Return the names of the profiles that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


@lru_cache(maxsize=64)
def read(path: Path) -> Profile:
    """Read the profile in a file. StoredFileError names file, field, got and expected."""
    return Profile.from_json(read_bytes(path, f"a profile, or one of {', '.join(shipped())}"), str(path))


def load(which: str | Path | Profile | None = None, ranks: int | None = None, device: str | None = None) -> Profile:
    """Return a profile. `which`: a profile, its path, or the name of a shipped one.

    None: the one measured on this machine (for groups of `ranks` if there is one), else the one shipped for this kind of
    device, else an analytic one; the result is logged. `device`: "cuda" or "cpu" (None: cuda where there is one). OptionError
    for anything that is not a profile.
    """
    if isinstance(which, Profile):
        found = which
    elif which is not None:
        name = str(which)
        found = read(FOLDER / f"{name}.json") if name in shipped() else read(Path(name))
    else:
        found = _of_this_machine(device or machine.device(), ranks or 0)
    _used[str(found)] = found
    return found


_used: dict[str, Profile] = {}
"""The profiles that this process has used, by their names in plans."""


def of_plan(names: str, ranks: int) -> Profile | None:
    """Return the profile that a plan used for a group of `ranks`. `names`: the plan's profiles, separated by commas.

    None where it is not available: not used by this process, not shipped, and not in the user's cache directory.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    found = [profile for name in wanted if (profile := _used.get(name) or _stored().get(name)) is not None]
    if len(found) < len(wanted) or not found:
        return None
    return min(found, key=lambda p: (abs(math.log2(max(int(p.key.get("ranks") or ranks), 1) / max(ranks, 1))), str(p)))


@lru_cache(maxsize=1)
def _stored() -> dict[str, Profile]:
    """Return shipped and measured profiles, by their names in plans."""
    paths = [*FOLDER.glob("*.json")]
    with contextlib.suppress(OSError, RuntimeError):  # a directory that is not ours to read; no home at all
        paths += [path for path in profile_store.directory().glob("*.json") if path.is_file()]
    found = {}
    for path in sorted(paths):
        with contextlib.suppress(OptionError):
            profile = read(path)
            found[str(profile)] = profile
    return found


def signature(which: str | Path | None, devices: tuple[str, ...]) -> tuple[str, ...]:
    """Return the digests of profiles that `load` may return, for cache keys. `devices`: device types of the graphs' tensors."""
    if which is not None:
        return (load(which).digest,)
    return tuple(sorted({digest for device in devices for digest in _digests(device)}))


def _digests(device: str) -> frozenset[str]:
    """Return the digests of profiles that `_of_this_machine` may return, for groups of any size."""
    can_look = device == "cpu" or machine.device() == "cuda"
    mine, _ = profile_store.find_profiles(machine.key(device, 2)) if can_look else ([], [])
    ranks = {at for at, _ in mine} or {2}
    return frozenset({_of_this_machine(device, at).digest for at in ranks})


@lru_cache(maxsize=64)
def _of_this_machine(device: str, ranks: int) -> Profile:
    key = machine.key(device, ranks) if device == "cpu" or machine.device() == "cuda" else {"device": device}
    mine, others = profile_store.find_profiles(key)
    for told in others:
        log.info("profile left out: %s", told)
    for _, path in sorted(mine, key=lambda at: (abs(math.log2(at[0] / max(ranks, 1))), at[0])):
        try:
            profile = read(path)
        except OptionError as error:
            log.warning("profile left out: %s", error)
            continue
        log.info("profile %s, measured on this machine: %s", profile, path)
        return profile
    return fallback(device, str(key.get("gpu", "")))


def fallback(device: str, gpu: str) -> Profile:
    """Return the profile of an unmeasured device: the shipped one of a similar device, else an analytic one."""
    if device == "cpu":
        return read(FOLDER / "cpu.json")
    for part, stem in _BY_GPU:
        if part in gpu:
            profile = read(FOLDER / f"{stem}.json")
            log.info("profile %s, shipped; this %s is not calibrated (torchrun ... -m ub_overlap calibrate)", profile, gpu)
            return profile
    if machine.device() != "cuda":  # graphs of CUDA tensors without a GPU: only in tests
        return read(FOLDER / "h200.json")
    profile = analytic(**machine.properties())
    log.info("profile %s, from the device's properties alone: run torchrun ... -m ub_overlap calibrate", profile)
    return profile


def analytic(name: str, units: int, capability: tuple[int, int]) -> Profile:
    """Return an H200's profile scaled by the properties of an unmeasured GPU."""
    base = read(FOLDER / "h200.json")
    known = [c for c in _GENERATIONS if c <= tuple(capability)] or [min(_GENERATIONS)]
    per_unit, link, memory = _GENERATIONS[max(known)]
    _, base_link, base_memory = _GENERATIONS[9, 0]
    rate = per_unit * units / base.compute.tflops["bfloat16"]
    compute = ComputeModel(
        units=units,
        tiles=base.compute.tiles,
        tflops={dtype: tflops * rate for dtype, tflops in base.compute.tflops.items()},
        wave_us=base.compute.wave_us,
        launch_us=base.compute.launch_us,
        memory_gbs=memory,
        layouts=base.compute.layouts,
        cache_mib=base.compute.cache_mib,
    )

    def scaled(curve: tuple[tuple[float, float], ...], factor: float) -> tuple[tuple[float, float], ...]:
        return tuple((size, us * factor) for size, us in curve)

    return Profile(
        name=f"analytic:{name}",
        key={"device": "cuda", "gpu": name, "units": units},
        source=f"scaled from {base.name} by multiprocessors, and by what links and memory of capability {capability} do",
        compute=compute,
        matmuls=(),
        push=scaled(base.push, base_link / link),
        copy=scaled(base.copy, base_memory / memory),
        reduce=scaled(base.reduce, base_memory / memory),
        collectives={
            kind: {ranks: scaled(curve, base_link / link) for ranks, curve in curves.items()}
            for kind, curves in base.collectives.items()
        },
        steps=base.steps,
        matmul_slowdown=base.matmul_slowdown,
        push_slowdown=base.push_slowdown,
        network=base.network,
        holes=("everything: not measured",),
    )
