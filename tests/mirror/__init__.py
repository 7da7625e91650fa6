"""Mirror mode of the benchmarks: two processes stand for R ranks."""
