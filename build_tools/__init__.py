"""Helpers of setup.py and of releases, and of the profiles that ship. They are part of the sdist and are never installed."""
