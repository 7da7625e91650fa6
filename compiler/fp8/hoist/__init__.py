"""Move float8 casts that a graph already has in front of its all_gathers."""
