"""The tests; a package, so that ranks that a test starts can import its functions by name."""
