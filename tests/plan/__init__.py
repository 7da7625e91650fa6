"""Overrides, saved plans, planned steps, and predictions in reports."""
