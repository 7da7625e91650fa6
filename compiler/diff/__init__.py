"""The difference of two graphs: before and after a rewrite, of two ranks, of two runs, or of two versions of torch.

    snapshot_graph.py   FX graph -> Snapshot, a copy as plain data
    joint_snapshot.py   the snapshots that the passes take
    snapshot.py         the data of a snapshot, to JSON and back
    pair_nodes.py       pairs of corresponding nodes of two snapshots
    edits.py            unpaired and changed nodes, grouped by site: "all_gather + wait + 3 matmuls -> all_gather_matmul"
    rows.py             both graphs side by side, in order
    graph_store.py      the snapshots of compiled graphs, stored with their plans
    stored_report.py    stored reports, read and compared
    compare_ranks.py    the graphs of two ranks compared, for errors
    render/             text, HTML, DOT, model-explorer JSON

The time is linear in the size of the graphs.
"""
