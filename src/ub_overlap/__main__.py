"""`python -m ub_overlap`: what is installed here, the stored reports, plans made ahead, imported configurations.

    python -m ub_overlap --version
    python -m ub_overlap info [--json]                  versions, the extension, CUDA
    python -m ub_overlap doctor [--json]                what will work here and what will not, and why
    python -m ub_overlap explain REPORT.json [...]      a report of Report.to_json(): text, --site ID, --html FILE, ...
    python -m ub_overlap diff A.json B.json [...]       two reports: graphs and decisions that differ
    python -m ub_overlap bisect [--loss REGEX] -- COMMAND ...
                                                        the site that breaks a command, by halves
    python -m ub_overlap exposed TRACE.json [--json]    communication of a profiler trace that nothing runs beside
    python -m ub_overlap report list [--json]           stored reports, newest first
    python -m ub_overlap report show DIGEST [--json]    one of them; the first digits of the digest suffice
    torchrun --nproc-per-node N -m ub_overlap calibrate [--quick] [--out FILE]
                                                        measure this machine for the cost model
    python -m ub_overlap plan --model llama-70b [...]   the predicted step of a block, on a machine without a GPU
    python -m ub_overlap import-cfg FILE [--json]       a tp_comm_overlap_cfg of Megatron, NeMo or TransformerEngine as rules

Exit codes: 0 it worked; 1 it did not (`info`, `doctor`: the package cannot run here; `report`: no such report; `diff`: they
differ); 2 bad usage (`diff`: also a file that is no report).
"""

from __future__ import annotations

import sys

from ub_overlap.cli import main

if __name__ == "__main__":
    sys.exit(main())
