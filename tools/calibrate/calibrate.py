"""`torchrun --nproc-per-node N -m ub_overlap calibrate`: measure, fit, check, and keep the profile."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

from ub_overlap.compiler.cost.profile import Profile
from ub_overlap.compiler.cost.profile_lookup import fallback
from ub_overlap.runtime import machine, profile_store

from .fit import errors, fit


def calibrate(out: str | None = None, device: str | None = None, *, quick: bool = False) -> Path:
    """Measures on all ranks of torchrun; rank 0 writes the profile (to `out`, or the user's cache). Returns its path.

    OptionError outside of torchrun.
    """
    from . import run, world

    here = world.start(device)
    begun = time.monotonic()
    base = fallback(here.device.type, str(machine.key(here.device.type, here.ranks).get("gpu", "")))
    command = f"torchrun --nproc-per-node {here.ranks} -m ub_overlap calibrate{' --quick' if quick else ''}"
    made = run.run(here, json.loads(base.to_json()), quick, command)
    profile = fit(Profile.from_json(json.dumps(made), "this calibration"))
    path = Path(out) if out else profile_store.path_of(dict(profile.key))
    if here.rank == 0:
        profile_store.write(path, profile.to_json())
        print(summary(profile, path, time.monotonic() - begun), flush=True)
        sys.stdout.flush()
    world.end(here)
    return path


def summary(profile: Profile, path: Path, seconds: float) -> str:
    """What was measured, in a few lines."""
    rates = [(2e-6 * m * n * k / us, f"{m}x{n}x{k}") for _, dtype, m, n, k, us in profile.matmuls if dtype == "bfloat16"]
    rate, where = max(rates, default=(0.0, "-"))
    size, us = profile.push[-1]
    found = errors(profile)
    off = [abs(p / m - 1) for _, p, m in found]
    steps, slow, slowed = profile.steps, profile.matmul_slowdown, profile.push_slowdown
    lines = [
        f"profile {profile}: {path} ({seconds:.0f} s)",
        f"  {len(profile.matmuls)} matmuls, best bfloat16 {rate:.4g} TFLOP/s at {where}",
        f"  push of {size / 2**20:.3g} MiB {size / us / 1e3:.4g} GB/s; beside it a matmul takes {slow:.1%} more time,",
        f"  and it {slowed:.1%} more beside a matmul",
        f"  us: begin and end {steps.begin_us + steps.end_us:.3g}, event {steps.event_us:.3g}, flag {steps.flag_us:.3g}",
    ]
    lines += [f"  {text}: predicted {p:.1f} us, measured {m:.1f}" for text, p, m in found]
    if off:
        lines.append(f"  whole calls: median error {statistics.median(off):.1%}, most {max(off):.1%}")
    lines += [f"  hole: {hole}" for hole in profile.holes]
    return "\n".join(lines)
