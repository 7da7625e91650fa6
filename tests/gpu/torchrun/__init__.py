"""GPU tests that run on every rank of torchrun, in lockstep."""
