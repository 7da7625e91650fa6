"""Sample the clock and power of a GPU while a call is repeated: a GPU at its power limit runs slower, the less it waits."""

from __future__ import annotations

import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

PERIOD_MS = 20
SECONDS = 1.2
"""How long a call is repeated: the power limit acts within a fraction of it."""
TAIL = 0.6
"""The share of the samples that counts, the last ones."""


def median_of_samples(text: str) -> dict[str, float]:
    """Return the medians of the last samples: `sm_mhz` and `watts`. Each line of `text` has both, separated by a comma."""
    samples = []
    for line in text.splitlines():
        mhz, _, watts = line.partition(",")
        try:
            samples.append((float(mhz), float(watts)))
        except ValueError:
            continue  # the last line may be cut off; a GPU may not tell its power
    if len(samples) < 5:
        raise RuntimeError(f"nvidia-smi gave {len(samples)} samples of clock and power, expected at least 5")
    last = samples[int(len(samples) * (1 - TAIL)) :]
    return {"sm_mhz": statistics.median(mhz for mhz, _ in last), "watts": statistics.median(watts for _, watts in last)}


def sample(call: Callable[[], Any], count: int) -> dict[str, float]:
    """Run a call `count` times on the current GPU. Return `median_of_samples` of that time."""
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    query = ["nvidia-smi", "-i", f"GPU-{uuid}", "--query-gpu=clocks.sm,power.draw.instant"]
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen([*query, "--format=csv,noheader,nounits", f"-lms={PERIOD_MS}"], stdout=out)
        try:
            begun = time.monotonic()
            for _ in range(count):
                call()
            torch.cuda.synchronize()
            time.sleep(max(0.0, 0.3 - (time.monotonic() - begun)))  # a call of no time: nvidia-smi takes 0.1 s to begin
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:  # it must not outlive the run, nor hide an error of the call
                process.kill()
        out.seek(0)
        return median_of_samples(out.read())
