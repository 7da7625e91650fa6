"""Llama blocks with sharded weights: gathers and reductions of every weight against FSDP2, Inductor and compute alone."""
