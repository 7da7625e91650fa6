"""Programs that try an executor on real devices, and the tests that start them."""
