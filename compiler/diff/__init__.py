"""What a rewrite did to a graph, and how two graphs differ.

    take.py       FX graph -> Snapshot, a copy as plain data       (the only file here that imports torch)
    snapshot.py   the data, to JSON and back
    match.py      which node of one snapshot is which node of the other
    edits.py      what is left, grouped by site: "all_gather + wait + 3 matmuls -> all_gather_matmul"
    rows.py       both graphs side by side, in order
    store.py      the snapshots of compiled graphs, beside their plans
    render/       text, HTML, DOT, model-explorer JSON

Before against after, rank against rank, run against run, torch against torch: the same engine, linear in the graphs.
"""
