"""`torchrun --nproc-per-node N -m ub_overlap calibrate`: measure, fit, check, and write the profile."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ub_overlap.compiler.cost.profile import Profile
from ub_overlap.compiler.cost.profile_lookup import fallback, load
from ub_overlap.runtime import machine, profile_store, stored_file
from ub_overlap.runtime.errors import OptionError
from ub_overlap.runtime.session.host_layout import world_hosts

from .fit import compare_calls, fit, median_error

if TYPE_CHECKING:
    from .world import CalibrationWorld

LARGEST_ERROR = 0.25
"""Of a usable profile, the largest median error of whole calls. Overlap saves at most half of a site's time, as it takes at
least as long as the longer of matmul and communication. With errors above half of that, predictions cannot tell what is faster.
"""


def calibrate(out: str | None = None, device: str | None = None, *, quick: bool = False) -> bool:
    """Measure on all ranks of torchrun, and return whether the profile is usable, the same on all ranks.

    Rank 0 writes the profile to `out`, or to the user's cache, from which processes read it, if it is usable. On GPUs also
    store the fastest algorithms of the measured calls' matmuls. Ranks of several hosts measure the network only, and add it to
    the profile of their machines.

    OptionError outside of torchrun, or without a folder for the profile.
    """
    if out is None:
        _check_folder()
    from . import algorithms, run, world

    ranks = world.start(device)
    start = time.monotonic()
    hosts = world_hosts()
    if len(set(hosts)) > 1:
        return _calibrate_network(ranks, hosts, start, out, quick)
    base = fallback(ranks.device.type, str(machine.key(ranks.device.type, ranks.ranks).get("gpu", "")))
    command = f"torchrun --nproc-per-node {ranks.ranks} -m ub_overlap calibrate{' --quick' if quick else ''}"
    measured = run.run(ranks, json.loads(base.to_json()), quick, command)
    profile = fit(Profile.from_json(json.dumps(measured), "this calibration"))
    path = Path(out) if out else profile_store.path_of(dict(profile.key))
    problem, failure = find_problem(profile), None
    if ranks.rank == 0:
        print(summarize(profile, path, time.monotonic() - start), flush=True)
        failure = _write(profile, path) if out or not problem else None
    chosen = algorithms.choose(ranks)  # behind the profile, which is complete without
    if chosen and ranks.rank == 0:
        print(algorithms.summarize(chosen), flush=True)
    if ranks.rank == 0 and not failure:
        print(verdict(problem, path, bool(out)), flush=True)
    world.end(ranks, failure)
    if failure:
        raise failure
    return not problem


def find_problem(profile: Profile) -> str:
    """Return why predictions of a profile do not select strategies, "" if they do."""
    error = median_error(profile)
    if error is None:
        return "no whole call was measured, so nothing shows whether its predictions are right"
    if error > LARGEST_ERROR:
        return f"whole calls are predicted with a median error of {error:.0%}, and at most {LARGEST_ERROR:.0%} is usable"
    return ""


def verdict(problem: str, path: Path, is_chosen: bool) -> str:
    """Return the last line of a calibration. `is_chosen`: `path` is of --out, and is written in any case."""
    if not problem:
        return "the profile is usable: " + (
            f"options={{'profile': {str(path)!r}}} selects it" if is_chosen else "processes on this machine use it from now on"
        )
    kept = f"{path} has it nevertheless" if is_chosen else "it is not stored, and the profile used until now stays"
    return f"the profile is not usable: {problem}; {kept}. Calibrate again while nothing else runs on this machine"


def _calibrate_network(ranks: CalibrationWorld, hosts: Sequence[str], start: float, out: str | None, quick: bool) -> bool:
    """Add the network between several hosts to rank 0's profile. The first rank of each host writes it, unless `out` is set."""
    from . import network, world

    count = len(set(hosts))
    profile, key = load(None, ranks.ranks // count, ranks.device.type), machine.key(ranks.device.type, ranks.ranks // count)
    if machine.differing_fields(dict(profile.key), key):  # a shipped profile: with the network it becomes this machine's
        profile = replace(profile, key=key)
    if profile.network is None:
        profile = replace(profile, network=fallback("cpu", "").network)
    base = Profile.from_json(ranks.gather(profile.to_json())[0], "rank 0's profile")
    command = f"torchrun --nnodes {count} -m ub_overlap calibrate{' --quick' if quick else ''}"
    profile = network.run(ranks, base, count, quick, command)
    path = Path(out) if out else profile_store.path_of(dict(profile.key))
    failure: OptionError | None = None
    if ranks.rank == 0 or (not out and ranks.rank == hosts.index(hosts[ranks.rank])):
        failure = _write(profile, path)
    if ranks.rank == 0:
        assert profile.network is not None
        print(f"profile {profile}: {path} ({time.monotonic() - start:.0f} s)\n{network.summarize(profile.network)}", flush=True)
        print("\n".join(f"  hole: {hole}" for hole in ranks.holes), end="\n" if ranks.holes else "", flush=True)
    world.end(ranks, failure)
    if failure:
        raise failure
    return True


def _write(profile: Profile, path: Path) -> OptionError | None:
    """Write a profile. Return the error where that is not possible."""
    try:
        stored_file.write(path, profile.to_json())
    except OSError as error:
        return OptionError("cannot write the profile", where=str(path), got=str(error), fix="use --out FILE")
    return None


def _check_folder() -> None:
    """Raise OptionError where there is no folder for the profile, before minutes of measuring."""
    try:
        profile_store.directory()
    except FileNotFoundError as error:
        fix = "set UB_OVERLAP_CACHE_DIR, or use --out FILE"
        raise OptionError("no folder for the profile", where=str(error.filename), got="no home folder", fix=fix) from error


def summarize(profile: Profile, path: Path, seconds: float) -> str:
    """Return the measurements in a few lines."""
    rates = [(2e-6 * m * n * k / us, f"{m}x{n}x{k}") for _, dtype, m, n, k, us in profile.matmuls if dtype == "bfloat16"]
    rate, where = max(rates, default=(0.0, "-"))
    size, us = profile.push[-1]
    calls = compare_calls(profile)
    steps, matmul_slowdown, push_slowdown = profile.steps, profile.matmul_slowdown, profile.push_slowdown
    lines = [
        f"profile {profile}: {path} ({seconds:.0f} s)",
        f"  {len(profile.matmuls)} matmuls, best bfloat16 {rate:.4g} TFLOP/s at {where}",
        f"  push of {size / 2**20:.3g} MiB {size / us / 1e3:.4g} GB/s; a concurrent matmul takes {matmul_slowdown:.1%} longer,",
        f"  a push concurrent with a matmul {push_slowdown:.1%} longer",
        f"  us: begin and end {steps.begin_us + steps.end_us:.3g}, event {steps.event_us:.3g}, flag {steps.flag_us:.3g}",
    ]
    lines += [f"  {text}: predicted {p:.1f} us, measured {m:.1f}" for text, p, m in calls]
    if calls:
        largest = max(abs(p / m - 1) for _, p, m in calls)
        lines.append(f"  whole calls: median error {median_error(profile):.1%}, largest {largest:.1%}")
    lines += [f"  hole: {hole}" for hole in profile.holes]
    return "\n".join(lines)
