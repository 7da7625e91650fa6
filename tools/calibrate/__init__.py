"""Measures a machine for the cost model: `torchrun --nproc-per-node N -m ub_overlap calibrate`.

machine.py   what is measured: GPU, driver, libraries, topology (the key of a profile)
cache.py     where profiles are kept
run.py       the order of the measurements, their budget, and the JSON they make
"""
