"""The grouped matmuls of experts: their times against the cost model's, and what it costs to cut them by source rank."""
