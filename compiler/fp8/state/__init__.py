"""Float8 state that outlives a call: amax histories and cached weights, as graph nodes."""
