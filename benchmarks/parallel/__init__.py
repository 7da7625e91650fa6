"""What the benchmarks of data, context and expert parallelism share: variants, flags, the run, tables."""
