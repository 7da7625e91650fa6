"""`python -m ub_overlap`: what is installed here, the stored reports, plans made ahead, imported configurations.

    python -m ub_overlap --version
    python -m ub_overlap info [--json]                  versions, the extension, CUDA
    python -m ub_overlap report list [--json]           stored reports, newest first
    python -m ub_overlap report show DIGEST [--json]    one of them; the first digits of the digest suffice
    torchrun --nproc-per-node N -m ub_overlap calibrate [--quick] [--out FILE]
                                                        measure this machine for the cost model
    python -m ub_overlap plan --model llama-70b [...]   the predicted step of a block, on a machine without a GPU
    python -m ub_overlap import-cfg FILE [--json]       a tp_comm_overlap_cfg of Megatron, NeMo or TransformerEngine as rules

Exit codes: 0 it worked; 1 it did not (`info`: the package cannot run here; `report`: no such report); 2 bad usage.
"""

from __future__ import annotations

import sys

from ub_overlap.cli import main

if __name__ == "__main__":
    sys.exit(main())
