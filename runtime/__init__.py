"""The runtime half of ub_overlap: schedules, sessions and the custom ops."""
