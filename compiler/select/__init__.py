"""candidates -> plan. Every collective gets a Decision; a pure function of graph, options, transport and device profile.

    graph.py    the collectives of a graph, all together
    wishes.py   what the user forces on which site
    legal.py    candidate -> the site that can be made of its match, or a Miss
    worth.py    is a site worth it, and how is it run: what the cost model says
    carry.py    one strategy for all calls, a table for sizes that change, or alternatives to be timed
    ways.py     candidate -> all ways in which it could be run, pipelined or beside other matmuls, and their worth
    memory.py   what lives along the graph, and what a site would hold
    pairing.py  of every candidate one way or none: those that fit together and save the most
    record.py   what came out, as a Decision

Ranks decide apart and must decide alike: nothing here rests on what one rank alone knows.
"""

from .decide import Decided, Transport, decide

__all__ = ["Decided", "Transport", "decide"]
