"""The collectives of ranks that share a GPU, which NCCL refuses: by gloo over copies in host memory. For numbers, not times."""
