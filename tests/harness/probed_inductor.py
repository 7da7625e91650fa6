"""Inductor, with the vector instructions known that it may use.

It compiles and loads a library for each set of instructions to find that out: 1 to 4 s of CPU, also with a warm cache.
"""

from torch._inductor import compile_fx  # noqa: F401  (imported for the processes that are forked from this one)
from torch._inductor.cpu_vec_isa import valid_vec_isa_list

valid_vec_isa_list()
