"""The fastest algorithm of cuBLASLt for each matmul of a call: searched on request, kept on disk, loaded with a group.

    store.py      the files: one per GPU model and version of the library
    loading.py    the stored algorithms of this process
    search.py     which of several proposals is the fastest on all ranks; no GPU
    tuning.py     a search for the matmuls of one call
    gpu.py        problems, proposals and times on the current GPU

The library's own first proposal is used without a search. It can be slower by up to 18%. A search runs in `calibrate` and where
a site is autotuned, never in another call and never while a CUDA graph is captured. Its result is used from then on, and in
later processes until `clear-cache`.

Algorithms differ in the order of their sums, so results may change in their last bits where the algorithm changes. All ranks
that search together, or read the same file, use the same one: equal operands then give equal results on them, as without a
search. Ranks of a larger group, some of which searched in a smaller one, may use different ones until they start again. Graphs
of torch's that were captured before a search keep their algorithms.
"""
