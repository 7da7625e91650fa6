"""Float8 state that outlives a call, as graph nodes: amax histories and cached weights."""
