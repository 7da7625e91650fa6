"""Float8 state of the process: amax histories and cached weights."""
