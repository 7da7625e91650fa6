"""A whole transformer block under tensor and sequence parallelism: how much of its communication is hidden."""
