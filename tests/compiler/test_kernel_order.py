"""The order of Inductor's kernels: collectives depend on each other, and kernels go back to their places behind fusion."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils._ordered_set import OrderedSet

from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.inductor import order_options
from ub_overlap.compiler.inductor.kernel_order import chain_collectives, in_order

START, READ, CAST = "ub_overlap::start_collective", "ub_overlap::start_host_read", "ub_overlap::fp8_cached_weight"
GATHER, WAIT, MM = "_c10d_functional::all_gather_into_tensor", "_c10d_functional::wait_tensor", "aten::mm"


class Kernel:
    """A node of Inductor's scheduler, with what the passes use of it: it runs operation "op_a" and writes buffer "a"."""

    def __init__(self, name: str, place: int, reads: str = "", op: str = "", buffers: str = "") -> None:
        """`place`: of its first operation. `reads`, `buffers`: buffers, a letter each."""
        self.name, self.min_order, self.buffers = name, place, buffers or name
        self.unmet_dependencies = [SimpleNamespace(name=read) for read in reads]
        overload = SimpleNamespace(namespace=op.partition("::")[0], name=lambda: f"{op}.default")
        self.node = SimpleNamespace(op_overload=overload) if op else None
        self.ancestors: Any = OrderedSet()

    def get_name(self) -> str:
        return f"op_{self.name}"

    def get_buffer_names(self) -> OrderedSet[str]:
        return OrderedSet(self.buffers)

    def get_nodes(self) -> list[Kernel]:
        return [self]

    def add_fake_dep(self, dependency: Any) -> None:
        self.unmet_dependencies.append(dependency)

    @property
    def scheduler(self) -> Any:
        return SimpleNamespace(name_to_buf=Buffers())


class Buffers(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        return SimpleNamespace(defining_op_name=lambda: f"op_{name}")


def names(kernels: list[Kernel]) -> str:
    return "".join(kernel.name for kernel in in_order(kernels))


def test_an_order_that_holds_stays() -> None:
    kernels = [Kernel("a", 0), Kernel("b", 1, "a"), Kernel("c", 2), Kernel("d", 3, "c")]
    assert names(kernels) == names(kernels[::-1]) == "abcd"


def test_a_fused_kernel_draws_nothing_forward() -> None:
    """ "f" is made of an operation at place 1 and one that reads "d": it follows "d", and "s" keeps its place."""
    a, f, s = Kernel("a", 0), Kernel("f", 1, "ad"), Kernel("s", 2, "a", START)
    b, d, e = Kernel("b", 3), Kernel("d", 4, "s"), Kernel("e", 5, "f")
    assert names([a, s, d, f, b, e]) == "asbdfe"


@pytest.mark.parametrize(("op", "expected"), [(START, "dfs12w"), (GATHER, "dfs12w"), (CAST, "12dfsw"), (WAIT, "12dfsw")])
def test_what_a_collective_reads_is_drawn_forward(op: str, expected: str) -> None:
    """ "f" is the operand of "s", fused with a reader of "d", which is late: "1" and "2" hide "s" all the same."""
    f, s, d = Kernel("f", 0, "d"), Kernel("s", 1, "f", op), Kernel("d", 8)
    assert names([d, f, s, Kernel("1", 2), Kernel("2", 3), Kernel("w", 9, "s", MM)]) == expected


def test_not_past_another_collective() -> None:
    """ "t" reads "x", which reads what "s" sends: "x" is drawn to "t", and not in front of "1", which hides "s"."""
    s, x, t = Kernel("s", 0, "", START), Kernel("x", 9, "s"), Kernel("t", 4, "x", START)
    assert names([s, x, t, Kernel("1", 1), Kernel("2", 5)]) == "s1xt2"


def test_inputs_and_own_buffers_are_no_dependencies() -> None:
    """A kernel of two buffers is one producer. "z" is an input of the graph."""
    assert names([Kernel("a", 1, "zy"), Kernel("b", 0, "bz", buffers="by")]) == "ba"


def test_a_cycle_keeps_the_order(caplog: pytest.LogCaptureFixture) -> None:
    assert names([Kernel("b", 1, "c"), Kernel("c", 0, "b"), Kernel("a", 2)]) == "bca"
    assert "2 of 3 kernels depend on each other" in caplog.text


def test_any_graph_is_sorted() -> None:
    """Every kernel follows what it reads, and none is lost."""
    draw = random.Random(4)
    for _ in range(50):
        letters = [chr(0x4E00 + i) for i in range(40)]
        places = draw.sample(range(40), 40)
        kernels = [
            Kernel(name, places[i], "".join(draw.sample(letters[:i], min(i, 3))), draw.choice(["", MM, START]))
            for i, name in enumerate(letters)
        ]
        seen: set[str] = set()
        for kernel in in_order(draw.sample(kernels, 40)):
            assert {d.name for d in kernel.unmet_dependencies} <= seen
            seen |= set(kernel.get_buffer_names())
        assert len(seen) == 40


def test_collectives_depend_on_the_one_before() -> None:
    """Fusion then finds a cycle where it would put "t" in front of "s". Casts, waits and reads of the host stay free."""
    s, cast, t = Kernel("s", 0, "", START), Kernel("c", 1, "", CAST), Kernel("t", 2, "", GATHER)
    wait, read, m = Kernel("w", 3, "t", WAIT), Kernel("r", 4, "", READ), Kernel("m", 5, "w", MM)
    u = Kernel("u", 6, "", "ub_overlap::all_gather_matmul_flat")
    kernels = [s, cast, t, wait, read, m, u]
    assert chain_collectives(kernels) == kernels
    assert [[d.name for d in k.unmet_dependencies] for k in kernels] == [[], [], ["s"], ["t"], [], ["w"], ["t"]]
    assert t.ancestors == OrderedSet(["op_s"]) and wait.ancestors == OrderedSet(["op_s", "op_t"])
    assert m.ancestors == OrderedSet(["op_s", "op_t", "op_w"]) and u.ancestors == wait.ancestors
    assert not (cast.ancestors or read.ancestors or s.ancestors) and isinstance(m.ancestors, OrderedSet)


def test_a_users_passes_around_fusion_run_in_front_of_ours() -> None:
    """Inductor has one hook for each. What they held comes back with its other options, also between parts of a graph."""
    config, hooks = compat.__getattr__("inductor_config"), order_options.HOOKS
    assert {*hooks} <= {*order_options.ordering_options()}
    with config.patch(order_options.ordering_options() | dict.fromkeys(hooks, lambda nodes: [*nodes, "theirs"])):
        with order_options.restored_order():
            order_options.set_passes(lambda nodes: [*nodes, "before"], lambda nodes: [*nodes, "behind"])
            found = [getattr(config, hook)(["node"]) for hook in hooks]
            assert found == [["node", "theirs", "before"], ["node", "theirs", "behind"]]
            current = config.get_config_copy()
            moving = [name for name in order_options.ordering_options() if name.split(".")[-1] not in hooks]
            assert moving and not any(current[name] for name in moving)
        assert config.reorder_for_peak_memory and config._post_fusion_custom_pass([]) == ["theirs"]
    assert [getattr(config, hook) for hook in hooks] == [None, None]
