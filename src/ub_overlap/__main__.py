"""`python -m ub_overlap`: diagnosis, stored reports, plans without a GPU, imported configurations.

    python -m ub_overlap --version
    python -m ub_overlap info [--json]                  versions, the extension, CUDA
    python -m ub_overlap doctor [--json]                what works on this machine, what does not, and why
    python -m ub_overlap doctor --bundle FILE.zip       one file for a bug report
    python -m ub_overlap explain REPORT.json [...]      show a report of Report.to_json(): text, --site ID, --html FILE, ...
    python -m ub_overlap diff A.json B.json [...]       compare two reports: graphs and decisions that differ
    python -m ub_overlap bisect [--loss REGEX] -- COMMAND ...
                                                        find the site that breaks a command
    python -m ub_overlap exposed TRACE.json [--json]    exposed communication of a profiler trace
    python -m ub_overlap report list [--json]           list stored reports, newest first
    python -m ub_overlap report show DIGEST [--json]    show one of them; the first digits of the digest are enough
    python -m ub_overlap clear-cache [--dry-run]        remove stored reports, results, flight records
    torchrun --nproc-per-node N -m ub_overlap calibrate [--quick] [--out FILE]
                                                        measure this machine for the cost model
    python -m ub_overlap plan --model llama-70b [...]   predict the step of a block, without a GPU
    python -m ub_overlap import-cfg FILE [--json]       print a tp_comm_overlap_cfg of Megatron, NeMo or TE as rules
    python -m ub_overlap completion bash                print a script that completes ub-overlap in bash, zsh or tcsh

Exit codes: 0 success; 1 the verb found a problem (`info`, `doctor`: the package cannot run here; `diff`: the reports differ;
`bisect`: no bad site found); 2 bad usage, or a file that cannot be read; 3 an error inside this package. All flags are in
docs/reference/cli.md.
"""

from __future__ import annotations

import sys

from ub_overlap.cli import main

if __name__ == "__main__":
    sys.exit(main())
