"""One op: all_gather -> matmul and matmul -> reduce_scatter against every rival and the floor."""
