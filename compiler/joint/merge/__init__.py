"""Merge collectives of one group: sums of reductions, gathers of one tensor, and steps of a ring that backward repeats.

    all_reduce(a) + all_reduce(b)          becomes    all_reduce(a + b)
    reduce_scatter(a) + reduce_scatter(b)  becomes    reduce_scatter(a + b)           merge_reductions.py
    all_gather(x), all_gather(x)           becomes    all_gather(x)                   merge_gathers.py
    all_to_all(x), all_to_all(x)           becomes    all_to_all(x)                   merge_exchanges.py, rings only, as
                                                                                      gathers that backward repeats

The backward of q, k, v and of w1, w3 sends half the bytes or less. Linears that each gather their input share one gather.
Backward of a ring reads the keys and values that forward received.
The passes run on the joint graph, before the partitioner, because they change what is computed.
"""
