"""Planning without the machine: the real tensor-parallel block, traced over ranks that do not exist, through our own passes.

    models.py   the blocks that can be planned, and their sizes
    trace.py    block -> the decisions of its forward and backward graph, and what else those graphs compute
    rest.py     time of what is no site: other matmuls, attention, elementwise work
    step.py     all of it together: the predicted step, as rows, totals, JSON and a plan to load

No GPU, no memory (fake tensors), no peers (torch's fake process group).
"""
