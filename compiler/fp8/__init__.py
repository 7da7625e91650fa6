"""Float8 on the joint graph: insert casts into 16-bit models, hoist casts that graphs already have, keep state.

insert/   16-bit linears become scaled matmuls, and their gathers carry one byte per element
hoist/    casts after an all_gather move before it, and scales after a matmul move into it
state/    what outlives a call: amax histories and cached weights, as graph nodes
"""
