"""Tests of overrides, saved plans, planned steps, and predictions in reports."""
