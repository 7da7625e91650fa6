"""Run under torchrun, or by run_all.py."""
