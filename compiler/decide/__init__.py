"""candidates -> plan. Every collective gets a Decision; a pure function of graph, options, transport and device profile.

    graph.py    the collectives of a graph, one after the other
    wishes.py   what the user forces on which site
    legal.py    candidate -> the site that can still be made of it, or a Miss
    worth.py    is it worth it, and how is it run: what the cost model says
    carry.py    one strategy for all calls, a table for sizes that change, or alternatives to be timed
    record.py   what came out, as a Decision

Ranks decide apart and must decide alike: nothing here rests on what one rank alone knows.
"""

from .graph import Decided, Transport, decide

__all__ = ["Decided", "Transport", "decide"]
