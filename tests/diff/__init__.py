"""Tests of graph snapshots, diffs and HTML pages."""
