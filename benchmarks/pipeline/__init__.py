"""Pipeline parallelism: messages alone and next to matmuls, and steps of schedules, over our channels and over c10d."""
