"""Measurements that stand in docs/. Never tests: timings gate nothing.

This file runs before any benchmark imports torch, and forbids NVLink multicast to everything that reads the environment later.
"""

import os

MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
os.environ.update(MULTICAST_OFF)
