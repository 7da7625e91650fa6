"""Package of the tests, so that ranks can import test functions by name."""
