"""The order of Inductor's kernels behind fusion: that of the graph, as far as dependencies allow."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from ub_overlap.compiler.inductor.kernel_order import in_order


def kernel(name: str, place: int, reads: str = "", namespace: str = "") -> Any:
    """Return a kernel that writes buffer `name`. `place`: of its first operation. `reads`: buffers, a letter each."""
    op = SimpleNamespace(namespace=namespace) if namespace else None
    return SimpleNamespace(
        get_buffer_names=lambda: {name},
        unmet_dependencies=[SimpleNamespace(name=read) for read in reads],
        min_order=place,
        node=SimpleNamespace(op_overload=op) if op else None,
    )


def names(kernels: list[Any]) -> str:
    return "".join(name for k in in_order(kernels) for name in k.get_buffer_names())


def test_a_fused_kernel_draws_nothing_forward() -> None:
    """ "f" is made of an operation at place 1 and one that reads "d": it follows "d", whose start keeps its place."""
    a, f = kernel("a", 0), kernel("f", 1, "ad")
    s, b, d, e = kernel("s", 2, "a", "ub_overlap"), kernel("b", 3), kernel("d", 4, "s"), kernel("e", 5, "f")
    assert names([a, s, d, f, b, e]) == "asbdfe"


def test_an_order_that_holds_stays() -> None:
    kernels = [kernel("a", 0), kernel("b", 1, "a"), kernel("c", 2), kernel("d", 3, "c")]
    assert names(kernels) == names(kernels[::-1]) == "abcd"


@pytest.mark.parametrize(("namespace", "expected"), [("ub_overlap", "basx"), ("_c10d_functional", "basx"), ("aten", "xbas")])
def test_collectives_stay_in_order(namespace: str, expected: str) -> None:
    """ "s" waits for "a", which waits for "b"; "x", behind "s" in the graph, is ready at once. Other ops do not wait."""
    s, x = kernel("s", 0, "a", namespace), kernel("x", 1, "", namespace)
    assert names([s, x, kernel("a", 3, "b"), kernel("b", 2)]) == expected


def test_data_decide_where_fusion_reverses_collectives() -> None:
    """ "f" joins an operand of "s" with a reader of "t", which comes later."""
    s, t, f = kernel("s", 1, "f", "ub_overlap"), kernel("t", 2, "", "ub_overlap"), kernel("f", 0, "t")
    assert names([s, t, f]) == "tfs"


def test_reads_of_inputs_and_of_itself_are_no_dependencies() -> None:
    assert names([kernel("a", 1, "zb"), kernel("b", 0, "b")]) == "ba"


def test_any_graph_is_sorted() -> None:
    """Every kernel follows what it reads, and none is lost."""
    draw = random.Random(4)
    for _ in range(50):
        letters = [chr(0x4E00 + i) for i in range(40)]
        places = draw.sample(range(40), 40)
        kernels = [
            kernel(name, places[i], "".join(draw.sample(letters[:i], min(i, 3))), draw.choice(["", "", "ub_overlap"]))
            for i, name in enumerate(letters)
        ]
        found = in_order(draw.sample(kernels, 40))
        seen: set[str] = set()
        for k in found:
            assert {d.name for d in k.unmet_dependencies} <= seen
            seen |= k.get_buffer_names()
        assert len(seen) == 40
