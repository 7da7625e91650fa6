"""Measurements of the documentation. They are not tests: no timing decides over success.

This file runs before any benchmark imports torch. It disables NVLink multicast in the environment.
"""

import os

MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
os.environ.update(MULTICAST_OFF)
