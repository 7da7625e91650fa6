"""Measure a machine for the cost model: `torchrun --nproc-per-node N -m ub_overlap calibrate`.

calibrate.py   the command: measure, fit, write the profile, print a summary
run.py         the order of the measurements, their budget, and the JSON that they make
matmuls.py     matmuls over a grid of shapes
traffic.py     pushes and plain collectives
kernels.py     the executor's kernels and steps, and whole calls
algorithms.py  the fastest algorithms of the calls' matmuls
fit.py         costs that no single measurement shows, fitted to whole calls
launch.py      the ranks that torchrun started; no torch
world.py       the ranks, their probes, and the timing of calls

The key of a profile is in runtime/machine.py, the files are in runtime/profile_store.py.
"""
