"""Tests of snapshots, node matching, edits and diff rows on hand-written and random graphs."""

from __future__ import annotations

import json
import random
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from tests.diff.samples import after, before, graphs, renamed, with_clone
from ub_overlap.compiler.diff import compare_ranks
from ub_overlap.compiler.diff.compare_ranks import explain_difference
from ub_overlap.compiler.diff.edits import Diff
from ub_overlap.compiler.diff.graph_store import PlanGraphs
from ub_overlap.compiler.diff.pair_nodes import NONE, pair_nodes
from ub_overlap.compiler.diff.rows import align_rows
from ub_overlap.compiler.diff.snapshot import NodeShot, Snapshot
from ub_overlap.runtime import plan_store, stored_file
from ub_overlap.runtime.errors import StoredFileError
from ub_overlap.runtime.session import plan_graphs


def names(s: Snapshot, places: tuple[int, ...]) -> list[str]:
    return [s.nodes[i].name for i in places]


def test_a_rewrite_is_an_edit_a_site() -> None:
    d = Diff(before(), after())
    assert [(e.site, e.title) for e in d.edits] == [
        ("forward.0", "all_gather + wait + 2 matmuls -> all_gather_matmul"),
        ("forward.1", "matmul + reduce_scatter + wait -> matmul_reduce_scatter"),
    ]
    first = d.by_site["forward.0"]
    assert names(d.a, first.removed) == ["gather", "wait", "mm", "mm_1"]
    assert names(d.b, first.added) == ["fused", "outs", "out", "out_1"]
    assert (first.module, first.source.split(": ")[0]) == ("mlp", "/home/me/model.py:12")
    assert d.counts() == "2 edits: 7 nodes removed, 6 added"


def test_what_is_left_alone_is_no_edit() -> None:
    d = Diff(before(), after())
    touched = {n for e in d.edits for n in names(d.a, e.removed) + names(d.b, e.added)}
    assert not touched & {"norm", "wait_2", "relu", "mul", "add", "output"}


@pytest.mark.parametrize("other", [before(lineage=""), renamed(before()), renamed(before(), "x")])
def test_the_same_graph_by_other_names(other: Snapshot) -> None:
    d = Diff(before(), other)
    assert d.same and d.first() == "" and d.counts() == "no difference (20 nodes)"
    assert all(j != NONE for j in d.matching.to_b)


def test_a_node_more() -> None:
    """An inserted node is the only difference, although later names and lines shift."""
    d = Diff(before(), renamed(with_clone(before())))
    (edit,) = d.edits
    assert edit.title == "nothing -> clone" and not edit.removed and not edit.changed
    assert "aten.clone.default" in d.first() and "no node of its own" in d.first()


def test_another_shape_is_a_change() -> None:
    """Nodes that differ only in sizes are still matched."""
    d = Diff(before(), before(rows=32, lineage="other", label="rank 1"))
    (edit,) = d.edits
    assert not edit.removed and not edit.added
    assert {f for c in edit.changed for f, _, _ in c.fields} == {"shape"}
    assert "x = placeholder() [64, 32]" in d.first() and "rank 1: x = placeholder() [32, 32]" in d.first()


def test_another_op_in_its_place() -> None:
    a = before()
    b = replace(a, nodes=tuple(n._replace(target="aten.gelu.default") if n.name == "relu" else n for n in a.nodes), lineage="")
    (edit,) = Diff(a, b).edits
    assert edit.title == "relu -> gelu"


def test_a_rewired_input_is_a_change() -> None:
    a = before()
    place = {n.name: i for i, n in enumerate(a.nodes)}
    swapped = a.nodes[place["mul"]]._replace(inputs=(place["mm_1"], place["relu"]))
    b = replace(a, nodes=tuple(swapped if n.name == "mul" else n for n in a.nodes))
    (edit,) = Diff(a, b).edits
    assert [c.fields for c in edit.changed] == [(("inputs", "relu, mm_1", "mm_1, relu"),)]


def test_json_and_back() -> None:
    text = json.dumps(before().to_dict())
    assert Snapshot.from_dict(json.loads(text)) == before()
    assert PlanGraphs.unpack(graphs().pack()) == graphs()
    joint = replace(graphs(), joint=(before(), after()))
    assert PlanGraphs.unpack(joint.pack()) == joint


@pytest.mark.parametrize(
    "broken",
    [
        {"version": 2},
        {"nodes": [["x", [3], *[0] * 10]]},
        {"nodes": [["x", [0], *[0] * 10]]},
        {"nodes": [["x", [], *[0] * 9, -1]]},
        {"nodes": [["x", [], *[0] * 9, 99]]},
        {"nodes": [["x", []]]},
        {"nodes": [3]},
        {"texts": None},
        {"columns": 3},
    ],
)
def test_what_is_no_snapshot(broken: dict[str, object]) -> None:
    own = graphs().to_dict()
    data = zlib.compress(json.dumps({**own, "before": {**own["before"], **broken}}).encode())
    with pytest.raises(StoredFileError, match="not the graphs of a plan: ") as caught:
        PlanGraphs.unpack(data, "some.graphs")
    assert "some.graphs" in caught.value.line and ("before" in caught.value.line or "nodes[0]" in caught.value.line)


def test_what_is_no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that are no graphs, a part of them, and data that inflates without end."""
    monkeypatch.setattr(stored_file, "MAX_BYTES", 1 << 20)
    packed = graphs().pack()
    bomb = zlib.compress(bytes(stored_file.MAX_BYTES + 1))
    for data, what in ((b"nonsense", "damaged"), (b"", "empty"), (packed[:-9], "truncated"), (bomb, "too large")):
        with pytest.raises(StoredFileError, match=what):
            PlanGraphs.unpack(data)


def random_graph(seed: int) -> Snapshot:
    rng = random.Random(seed)
    nodes = [NodeShot(name=f"p{i}", op="placeholder", target=f"p{i}", shape="[4]") for i in range(4)]
    for i in range(60):
        inputs = tuple(rng.randrange(len(nodes)) for _ in range(rng.choice((1, 2, 2))))
        target = f"aten.{rng.choice(('add', 'mul', 'neg', 'mm'))}.default"
        nodes.append(NodeShot(name=f"n{i}", inputs=inputs, target=target, args=", ".join("%" * len(inputs)), shape="[4]"))
    return Snapshot(tuple(nodes), "forward", f"seed {seed}")


@pytest.mark.parametrize("seed", range(12))
def test_any_two_graphs(seed: int) -> None:
    """Every node is matched once or in one edit; rows show every node once per side, in order."""
    a, b = random_graph(seed), random_graph(seed + 1000 if seed % 2 else seed)
    d = Diff(a, b)
    assert d.same is (seed % 2 == 0)
    pairs = [(i, j) for i, j in enumerate(d.matching.to_b) if j != NONE]
    assert len({j for _, j in pairs}) == len(pairs) and all(d.matching.to_a[j] == i for i, j in pairs)
    gone = sorted(i for e in d.edits for i in e.removed)
    came = sorted(j for e in d.edits for j in e.added)
    assert gone == [i for i, j in enumerate(d.matching.to_b) if j == NONE]
    assert came == [j for j, i in enumerate(d.matching.to_a) if i == NONE]
    shown = align_rows(d)
    assert [r.before for r in shown if r.before != NONE] == list(range(len(a.nodes)))
    assert [r.after for r in shown if r.after != NONE] == list(range(len(b.nodes)))
    assert {r.kind for r in shown if r.edit == NONE} <= {"same", "moved"}


def test_other_order_moves_rows_and_edits_nothing() -> None:
    a = random_graph(3)
    order = [*range(4), *sorted(range(4, len(a.nodes)), key=lambda i: (depth(a, i), i))]
    where = {i: k for k, i in enumerate(order)}
    moved = tuple(a.nodes[i]._replace(inputs=tuple(where[x] for x in a.nodes[i].inputs)) for i in order)
    d = Diff(a, replace(a, nodes=moved, label="sorted"))
    assert d.same and any(r.kind == "moved" for r in align_rows(d))


def depth(s: Snapshot, i: int) -> int:
    return 1 + max((depth(s, x) for x in s.nodes[i].inputs), default=0)


def test_matching_tells_how() -> None:
    m = pair_nodes(before(), renamed(before()))
    assert set(m.how) <= {"name", "structure", "neighbours", "provenance", "name again"}
    assert m.how[m.a.nodes.index(next(n for n in m.a.nodes if n.name == "relu"))] == "structure"
    assert set(pair_nodes(before(), after()).how) == {"lineage", ""}


def test_ranks() -> None:
    other = PlanGraphs("f" * 16, "forward", with_clone(before(lineage="two")), after()).pack()
    said = explain_difference(graphs().pack(), other, ("rank 0", "rank 3"))
    assert said.splitlines()[0] == "the forward graphs differ: 1 edit: 0 nodes removed, 1 added; the first node that differs:"
    assert "rank 3: clone = aten.clone.default(relu)" in said and "/home/me/model.py:12" in said
    assert "are the same (20 nodes)" in explain_difference(graphs().pack(), graphs().pack(), ("rank 0", "rank 1"))


def batch(rows: str, scale: str = "2.0", shard: str = "[4, 6]", stride: str = "[6, 1]") -> bytes:
    nodes = (
        NodeShot("x", op="placeholder", target="x", shape=f"[{rows}, 6]", stride=stride),
        NodeShot("w", op="placeholder", target="w", shape=shard),
        NodeShot("view", (0,), target="aten.view", args=f"%, [{rows}, 3, 2]", shape=f"[{rows}, 3, 2]"),
        NodeShot("mul", (2,), target="aten.mul", args=f"%, {scale}", shape=f"[{rows}, 3, 2]"),
        NodeShot("output", (3, 1), op="output", target="output", args="%, %"),
    )
    snapshot = Snapshot(nodes, "forward")
    return PlanGraphs("f" * 16, "forward", snapshot, snapshot).pack()


@pytest.mark.parametrize(
    ("own", "other", "advises"),
    [
        (batch("8"), batch("16"), True),
        (batch("s0"), batch("s0"), True),
        (batch("8"), batch("8"), False),
        (batch("8"), batch("16", scale="3.0"), False),
        (batch("8"), batch("8", scale="3.0"), False),
        (batch("8"), batch("8", stride="[1, 8]"), False),
    ],
)
def test_ranks_with_other_sizes(own: bytes, other: bytes, advises: bool) -> None:
    """Sizes are to be marked only where nothing else differs, or where they are dynamic."""
    assert ("hint_override" in explain_difference(own, other, ("rank 0", "rank 1"))) is advises


def test_graphs_of_a_rank_that_inflate_without_end() -> None:
    bomb = zlib.compress(bytes(compare_ranks.MAX_BYTES + 1))
    with pytest.raises(StoredFileError, match="too large") as caught:
        explain_difference(graphs().pack(), bomb, ("rank 0", "rank 3"))
    assert "graphs of rank 3" in caught.value.line


def test_ranks_whose_graphs_cannot_be_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error omits the graph difference when no graphs are available."""
    monkeypatch.setenv("UB_OVERLAP_CACHE_DIR", str(tmp_path))
    plan_graphs.install(explain_difference)
    assert plan_graphs.pack_graphs("0" * 16) == ""
    plan_store.save_graphs("0" * 16, graphs().pack())
    good = plan_graphs.pack_graphs("0" * 16)
    assert "the same" in plan_graphs.explain_difference(good, good, ("a", "b"))
    assert (
        plan_graphs.explain_difference(good, "", ("a", "b")) == plan_graphs.explain_difference(good, "AAAA", ("a", "b")) == ""
    )
    monkeypatch.setattr(plan_graphs, "MAX_BYTES", 10)
    assert plan_graphs.pack_graphs("0" * 16) == ""
