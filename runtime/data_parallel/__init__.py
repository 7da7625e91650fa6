"""Our transport for torch's own data parallelism, in eager code.

    eager_collectives.py    a collective into given memory: start and finish at once, in the current stream
    served_groups.py        which process groups have a transport; the others keep torch's collectives
    landing_slots.py        landing memory as the result of a gather, while nothing else uses it
    fsdp.py                 fully_shard (FSDP2): the all_gather and reduce_scatter of each module
    ddp.py                  DistributedDataParallel: a communication hook

Graphs that torch.compile traces need none of this: the compiler rewrites their collectives.
"""
