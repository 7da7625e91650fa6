"""Snapshots, diffs, pages."""
