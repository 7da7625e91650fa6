"""Faults of placing: where split collectives start and finish, and what moves for them."""

from __future__ import annotations

from .mutation import Mutation

PLACEMENT = "tests/compiler/test_placement.py"

MUTATIONS = (
    Mutation(
        name="slot-is-used-before-its-release",
        file="compiler/windows/placement.py",
        old="for k, o in (*self.open.items(), *self.unreleased.items()) if",
        new="for k, o in self.open.items() if",
        fault="landing memory of a zero-copy gather is given away while it is read",
        tests=(f"{PLACEMENT}::test_places_are_legal",),
    ),
    Mutation(
        name="held-inputs-take-no-memory",
        file="compiler/windows/placement.py",
        old=" - self.held - t.held_bytes",
        new=" - t.held_bytes",
        fault="inputs of open transfers do not count in the limit of memory",
        tests=(f"{PLACEMENT}::test_places_are_legal",),
    ),
    Mutation(
        name="slot-needs-no-rest",
        file="compiler/windows/placement.py",
        old="return left is not None and self.now < left + REST_US",
        new="return left is not None and self.now < left",
        fault="a start takes a slot that peers may still be in",
        tests=(f"{PLACEMENT}::test_a_start_takes_a_slot_that_the_peers_have_left",),
    ),
    Mutation(
        name="waiting-slows-matmuls",
        file="compiler/windows/placement.py",
        old="slowed = t.matmul_slowdown * max(0.0, t.transfer_us - exposed)",
        new="slowed = t.matmul_slowdown * t.transfer_us",
        fault="matmuls are slowed by the part of a transfer that is waited for",
        tests=(f"{PLACEMENT}::test_matmuls_slow_only_the_part_of_a_transfer_that_they_hide",),
    ),
    Mutation(
        name="sums-and-means-in-one-bucket",
        file="compiler/windows/buckets.py",
        old="return c.op, c.group, c.reduce_op, s.strategy,",
        new="return c.op, c.group, s.strategy,",
        fault="reductions of different kinds are sent together",
        tests=("tests/compiler/test_coalesced_choice.py::test_sums_and_means_are_not_joined",),
    ),
    Mutation(
        name="losing-bucket-stays",
        file="compiler/windows/choose.py",
        old="dropped = {i for i, gain in gains.items() if gain <= 0}",
        new="dropped = {i for i, gain in gains.items() if gain > 0}",
        fault="buckets that save more than their members alone are dropped, the others stay",
        tests=("tests/compiler/test_bucket_choice.py", "tests/compiler/test_coalesced_choice.py"),
    ),
    Mutation(
        name="landing-memory-is-sent-on",
        file="compiler/windows/landing_result.py",
        old="or is_mutable(user) or is_collective(user):",
        new="or is_mutable(user):",
        fault="a collective may still send landing memory that was released",
        tests=("tests/compiler/test_landing_result.py::test_look_alikes_are_copied",),
    ),
    Mutation(
        name="ring-step-starts-when-its-input-is-ready",
        file="compiler/windows/ring_slots.py",
        old="slot=n % slots, earliest=t.plain_at, latest=",
        new="slot=n % slots, latest=",
        fault="ranks of a ring start steps in an order of their own",
        tests=("tests/compiler/test_ring_slots.py::test_inputs_that_are_ready_early",),
    ),
    Mutation(
        name="exchange-passes-a-write",
        file="compiler/windows/pair_exchanges.py",
        old="return all(map(_may_move, nodes)) and not any(map(is_mutable, self.items[at:there]))",
        new="return all(map(_may_move, nodes))",
        fault="the second half's exchange moves in front of a write",
        tests=("tests/compiler/test_pair_exchanges.py::test_writes_and_random_numbers_are_not_passed",),
    ),
    Mutation(
        name="element-of-another-row",
        file="compiler/windows/host_reads.py",
        old="index += place % sizes[dim] * math.prod(sizes[dim + 1 :])",
        new="index += place % sizes[dim] * math.prod(sizes[:dim])",
        fault="the host reads another element of a matrix of counts",
        tests=("tests/compiler/test_host_reads.py::test_elements_of_a_matrix",),
    ),
    Mutation(
        name="widened-beyond-the-memory-limit",
        file="compiler/windows/widen.py",
        old="        if memory.peak <= limit:",
        new="        if memory.peak <= limit or order.moved:",
        fault="windows are widened whatever the memory peak becomes",
        tests=("tests/compiler/test_widen.py::test_peak_memory_limits_moves",),
    ),
    Mutation(
        name="what-feeds-a-collective-is-delayed",
        file="compiler/windows/widen.py",
        old="all(u in delayed or position[u] > at for u in node.users)",
        new="all(u in delayed or position[u] >= at for u in node.users)",
        fault="the input of a collective moves behind its start",
        tests=("tests/compiler/test_widen.py",),
    ),
    Mutation(
        name="release-before-readers-of-views",
        file="compiler/windows/layout.py",
        old="if alias_base(user) is not None:",
        new="if alias_base(user) is None:",
        fault="landing memory is released in front of what reads a view of it",
        tests=("tests/compiler/test_released_memory.py", "tests/compiler/test_split.py::test_zero3"),
    ),
    Mutation(
        name="halves-need-no-order",
        file="compiler/windows/placement.py",
        old="if t.first_half is not None and t.first_half not in self.placed:",
        new="if t.first_half is not None and t.first_half in self.placed:",
        fault="the second half of a hierarchical collective starts before the first has finished",
        tests=("tests/compiler/test_hierarchical_places.py",),
    ),
)
