"""The compiler on graphs that torch traces while the tests run."""
