"""Long-running programs: random calls for as long as wanted (soak), and the fault matrix. `python -m tests.soak --help`."""
