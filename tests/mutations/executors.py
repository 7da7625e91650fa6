"""Faults of the executors and sessions in C++. Each links the extension again."""

from __future__ import annotations

from .mutation import Mutation

OPS = "tests/runtime/test_ops.py"

MUTATIONS = (
    Mutation(
        name="ties-are-rounded-up",
        file="csrc/cpu/kernels.cpp",
        old="rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;",
        new="rounded = (u + 0x8000) >> 16;",
        fault="bfloat16 is rounded to nearest, but ties not to even",
        tests=("tests/runtime/test_memory_kernels.py", OPS),
    ),
    Mutation(
        name="strided-source-is-copied-in-a-row",
        file="csrc/cpu/kernels.cpp",
        old="if (src.stride == src.bytes && dst.stride == dst.bytes) {",
        new="if (src.stride == src.bytes || dst.stride == dst.bytes) {",
        fault="blocks of a strided tensor are copied as one",
        tests=("tests/runtime/test_memory_kernels.py", f"{OPS}::test_values"),
    ),
    Mutation(
        name="average-is-a-sum",
        file="csrc/cpu/executor.cpp",
        old="const float divisor = call_.average ? static_cast<float>(call_.ranks) : 1.0f;",
        new="const float divisor = 1.0f;",
        fault="an average over ranks is not divided",
        tests=(f"{OPS}::test_values",),
    ),
    Mutation(
        name="events-are-not-waited-for",
        file="csrc/cpu/executor.cpp",
        old="for (int event : step.after) wait_for_event(event);",
        new="if (round > 0) {\n                for (int event : step.after) wait_for_event(event);\n            }",
        fault="a push does not wait for the matmul whose result it sends",
        tests=("tests/runtime/test_races.py", f"{OPS}::test_values"),
    ),
    Mutation(
        name="other-shapes-are-called-another-site",
        file="csrc/cpu/waiter.cpp",
        old="same_site ? FailureCode::shape_mismatch : FailureCode::site_mismatch,",
        new="same_site ? FailureCode::site_mismatch : FailureCode::shape_mismatch,",
        fault="two errors change places",
        tests=("tests/runtime/test_failures.py::test_other_shapes", "tests/runtime/test_failures.py::test_other_sites"),
    ),
    Mutation(
        name="fused-calls-count-in-the-epochs-of-others",
        file="csrc/core/session.cpp",
        old="call.epoch = call.is_fused ? ++fused_epoch_ : ++epoch_;",
        new="call.epoch = ++epoch_;",
        fault="two fused collectives in a row use one slot",
        tests=("tests/runtime/test_fused.py::test_any_order_with_delays", "tests/runtime/test_fused.py"),
    ),
    Mutation(
        name="addend-is-added-with-the-second-term",
        file="csrc/core/call.cpp",
        old="const bool first = step.index == 0 && addend.data != nullptr;",
        new="const bool first = step.index == 1 && addend.data != nullptr;",
        fault="a bias is not added to a product of one matmul",
        tests=(f"{OPS}::test_values", OPS),
    ),
    Mutation(
        name="limit-of-a-table-is-exclusive",
        file="csrc/core/dispatch_table.cpp",
        old="rows > buckets_[number].limit) ++number;",
        new="rows >= buckets_[number].limit) ++number;",
        fault="a call of exactly the limit uses the next strategy",
        tests=("tests/compiler/test_dispatch_table.py::test_ops_pick_by_rows", "tests/compiler/test_dispatch_table.py"),
    ),
    Mutation(
        name="calls-are-not-counted",
        file="csrc/core/stats.cpp",
        old="stats.calls += 1;",
        new="stats.calls = 1;",
        fault="statistics forget earlier calls",
        tests=("tests/compiler/test_explain.py", "tests/compiler/test_dispatch_table.py"),
    ),
    Mutation(
        name="start-and-end-of-a-call-change-places",
        file="csrc/core/flight.cpp",
        old="(runs ? record.started_ns : record.ended_ns).store(",
        new="(runs ? record.ended_ns : record.started_ns).store(",
        fault="flight records say that calls ended before they started",
        tests=("tests/runtime/test_flight.py::test_records",),
    ),
    Mutation(
        name="later-rounds-send-the-first-rows",
        file="csrc/core/all_to_all.cpp",
        old="skip = is_own ? 0 : round * area_bytes;",
        new="skip = is_own || round > 1 ? 0 : round * area_bytes;",
        fault="the third round of a large piece of an all_to_all sends its first rows",
        tests=("tests/runtime/test_all_to_all.py",),
    ),
    Mutation(
        name="the-majority-is-blamed",
        file="csrc/core/published_calls.cpp",
        old="return votes_for(theirs) > votes_for(own) ?",
        new="return votes_for(theirs) < votes_for(own) ?",
        fault="a mismatch names the ranks that agree, not the odd one",
        tests=(
            "tests/runtime/test_failures.py::test_other_sites",
            "tests/runtime/test_blame.py::test_every_error_names_the_victim",
        ),
    ),
    Mutation(
        name="every-second-piece-is-sent-again",
        file="csrc/cpu/point_to_point.cpp",
        old="char* data = m.data + piece * slot_bytes;",
        new="char* data = m.data + piece / 2 * slot_bytes;",
        fault="pieces of a message are read from the places of others",
        tests=("tests/runtime/test_point_to_point.py::test_any_order_and_size",),
    ),
)
