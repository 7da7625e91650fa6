"""Plan a step without the machine: trace a real tensor-parallel block over fake ranks and run the compiler's passes on it.

    sizes.py            sizes of a block, and of known models; no torch
    models.py           the block as a module of DTensors
    trace.py            block -> decisions of its forward and backward graph, and the other work in those graphs
    unmatched_time.py   time of work outside of sites: other matmuls, attention, elementwise work
    planned_step.py     the predicted step as rows, totals, JSON and a plan to load
    pipeline_orders.py  schedule of torch.distributed.pipelining -> the order in which each rank computes
    pipeline_run.py     an order and times -> the step, with its bubble
    planned_pipeline.py the predicted step of a pipeline with every schedule; pipeline_figure.py draws it

It needs no GPU, no memory (fake tensors) and no peers (torch's fake process group).
"""
