"""The matmuls of a decode step behind a wait, during which a part of their weights is read into the L2 cache."""
