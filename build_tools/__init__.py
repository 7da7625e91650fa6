"""Helpers of setup.py and of releases. They are part of the sdist and are never installed."""
