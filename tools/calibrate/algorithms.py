"""Choose the algorithms of the matmuls that the calibration's calls have run, and store them (runtime/matmul_algorithms)."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import geometric_mean

from ub_overlap.runtime.matmul_algorithms import store, tuning
from ub_overlap.runtime.matmul_algorithms.store import ChosenAlgorithm

from .world import CalibrationWorld


def choose(world: CalibrationWorld) -> dict[str, ChosenAlgorithm] | None:
    """Search and store. None where that fails, or without a GPU. Collective."""
    if not world.cuda:
        return None
    from ub_overlap.runtime.matmul_algorithms import gpu

    def search() -> dict[str, ChosenAlgorithm]:
        device = gpu.MatmulGpu()
        return tuning.tune(device, device.device, device.library(), device.problems(), world.gather, write=world.rank == 0)

    chosen: dict[str, ChosenAlgorithm] | None = world.probe("algorithms of matmuls", search)
    return chosen


def summarize(chosen: Mapping[str, ChosenAlgorithm]) -> str:
    """Return one line: how many matmuls were searched, and what that saves."""
    faster = [row.first_us / row.us for row in chosen.values() if row.us < row.first_us]
    text = f"  algorithms: {len(faster)} of {len(chosen)} matmuls are faster than with the first proposal"
    if faster:
        text += f", {geometric_mean(faster) - 1:.1%} in the mean, {max(faster) - 1:.1%} at most"
    return f"{text}; stored in {store.directory()}"
