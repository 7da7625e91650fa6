"""A matmul between start and finish of a split collective, against the same matmul alone."""
