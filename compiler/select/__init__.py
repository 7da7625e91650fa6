"""candidates -> plan. Each collective gets a `Decision`: a pure function of graph, options, transport and device profile.

    decide.py            all collectives of a graph
    apply_overrides.py   candidate -> the user's request for it
    legality.py          candidate -> the site that its match allows, or a Miss
    profitability.py     site -> predicted gain and strategy
    fused_form.py        the strategy of a collective of few tokens
    pack_choice.py       site -> its form with packed operands
    dispatch_table.py    one strategy for all calls, a table for dynamic sizes, or alternatives to time
    alternatives.py      candidate -> its alternatives, pipelined, bulk or fused
    benefit.py           the key by which alternatives are compared
    peak_memory.py       live bytes along the graph, and what a site adds
    assignment.py        alternatives of all candidates -> at most one each
    decision_record.py   the result as a Decision

Each rank decides on its own and all ranks must decide alike. So no decision depends on what only one rank knows.

This file imports nothing: decide.py needs windows/, whose modules need other modules of this folder.
"""
