"""Point-to-point messages over symmetric memory: the functions `send`, `recv`, `isend`, `irecv`, and a c10d backend.

connect.py         the channels of a group: their sizes and memory, agreed on by all ranks (csrc/core/point_to_point.h)
messages.py        the functions
process_groups.py  process groups whose sends and receives use channels
"""
