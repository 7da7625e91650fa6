"""Faults that the tests named here do not notice, each with what would. Once a test does, a fault moves to its area."""

from __future__ import annotations

from .mutation import Mutation

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        name="bucket-without-a-limit-of-bytes",
        file="compiler/windows/buckets.py",
        old="if group.first >= group.last or group.bytes > self.most_bytes or",
        new="if group.first >= group.last or",
        fault="a bucket grows beyond the landing memory that it may have",
        tests=("tests/compiler/test_buckets.py::test_a_bucket_ends_where_its_bytes_are_enough",),
        note="copied bytes end the buckets of the test: large gathers with a small split_bytes would show the limit",
    ),
    Mutation(
        name="one-gather-makes-a-ring-of-gathers",
        file="compiler/windows/ring_slots.py",
        old="slots = GATHERS if all(by_order[k] is Op.ALL_GATHER for k in numbers) else EXCHANGES",
        new="slots = GATHERS if any(by_order[k] is Op.ALL_GATHER for k in numbers) else EXCHANGES",
        fault="a ring of gathers and exchanges has the slots of one of gathers",
        tests=("tests/compiler/test_ring_slots.py",),
        note="no ring of the tests has gathers and exchanges: fix_slots of both must give EXCHANGES slots",
    ),
    Mutation(
        name="sequence-of-one-part-a-rank",
        file="tools/planner/sizes.py",
        old="if self.seq % (2 * self.cp * self.tp):",
        new="if self.seq % (self.cp * self.tp):",
        fault="a sequence that cannot be balanced is planned",
        tests=("tests/plan/test_context.py::test_forms_that_do_not_fit",),
        note="test_forms_that_do_not_fit needs a sequence that divides by cp * tp, but not by twice as much",
    ),
    Mutation(
        name="most-chunks-are-refused",
        file="compiler/plan/strategy.py",
        old="wrong |= int(count or 0) > MAX_CHUNKS or",
        new="wrong |= int(count or 0) >= MAX_CHUNKS or",
        fault="the largest number of pieces is refused",
        tests=("tests/compiler/test_plan.py", "tests/compiler/test_dispatch_table.py::test_text"),
        note="'pipelined:chunks=64' is parsed by no pure test, and 65 is not refused by one",
    ),
    Mutation(
        name="stored-plan-forgets-what-is-sent",
        file="compiler/plan/decision.py",
        old='sent_dtype=d.get("sent_dtype", ""), rounds=',
        new="rounds=",
        fault="a plan that is read again has lost the type on the wire",
        tests=("tests/compiler/test_plan.py::test_json_round_trip",),
        note=("test_json_round_trip has defaults in most fields: each field of Decision must differ from its default there"),
    ),
    Mutation(
        name="another-name-of-an-input-is-a-change",
        file="compiler/diff/edits.py",
        old='different = [d for d in different if d[0] != "target"]',
        new='different = [d for d in different if d[0] != "args"]',
        fault="graphs that differ in the names of inputs have edits",
        tests=("tests/diff/test_engine.py::test_the_same_graph_by_other_names", "tests/diff/test_engine.py"),
        note="test_the_same_graph_by_other_names renames what is computed, not inputs",
    ),
    Mutation(
        name="second-pair-forgets-the-first",
        file="compiler/diff/rows.py",
        old="before[i] = at[k - 1] if k else NONE",
        new="before[i] = at[k - 1] if k > 1 else NONE",
        fault="rows that could be side by side are shown as moved",
        tests=("tests/diff/test_engine.py",),
        note=(
            "no graph of the tests has moved nodes in front of a pair: align_rows against the longest ascending "
            "list by brute force"
        ),
    ),
    Mutation(
        name="rewired-graphs-differ-in-sizes-only",
        file="compiler/diff/compare_ranks.py",
        old='return own == other and texts.keys() <= {"shape", "stride"}',
        new="return own == other",
        fault="ranks whose ops differ are advised to mark sizes as dynamic",
        tests=("tests/diff/test_engine.py",),
        note="test_ranks_with_other_sizes has no graphs that differ in a dtype alone",
    ),
    Mutation(
        name="reports-with-other-sites-are-the-same",
        file="compiler/diff/stored_report.py",
        old="return not self.sites and not self.missing and all(",
        new="return not self.missing and all(",
        fault="two runs with other decisions count as equal",
        tests=("tests/diff/test_commands.py::test_diff", "tests/diff/test_golden.py"),
        note="reports of the tests that differ in sites differ in graphs, too",
    ),
    Mutation(
        name="aggregate-cuts-reductions",
        file="compiler/overrides/megatron.py",
        old='return "pipelined:chunks=R/2" if aggregate and kind == _GATHER else "pipelined"',
        new='return "pipelined:chunks=R/2" if aggregate else "pipelined"',
        fault="an entry of a Megatron cfg means something else for reductions",
        tests=("tests/plan/test_megatron.py::test_every_entry",),
        note="test_every_entry has no 'aggregate' for a ring_exchange of a reduction",
    ),
    Mutation(
        name="trivial-group-is-unmatched",
        file="compiler/plan/outcome.py",
        old="Reason.NO_MATMUL, Reason.TRIVIAL_GROUP,",
        new="Reason.NO_MATMUL,",
        fault="a group of one rank is reported as not matched",
        tests=("tests/compiler/test_options.py::test_left_alone_by_choice_is_not_unmatched",),
        note="test_left_alone_by_choice_is_not_unmatched has some of the reasons: it should have all of BY_CHOICE",
    ),
    Mutation(
        name="checker-hears-earlier-calls",
        file="runtime/schedule/checker.py",
        old="heard.update(wait.flag.source for wait in waits(node.step) if node.closes and wait.back == 0)",
        new="heard.update(wait.flag.source for wait in waits(node.step) if node.closes)",
        fault="a peer's DONE of an earlier call counts as a word of this one",
        tests=("tests/schedule/test_checker.py::test_heard_rule", "tests/schedule/test_fused.py"),
        note=(
            "test_heard_rule has no wait for DONE: with one of the slot's earlier call (back=2) its schedules "
            "must be refused as well"
        ),
    ),
    Mutation(
        name="checker-misses-writes-over-reads",
        file="runtime/schedule/memory.py",
        old="conflicting = writers | read.get(cell, 0) if access.write else writers",
        new="conflicting = writers",
        fault="a write may run while another step reads the cell",
        tests=("tests/schedule/test_checker.py", "tests/schedule/test_mutations.py"),
        note=(
            "the results of such schedules are wrong, too: a push listed before a matmul that adds to what it "
            "sends must be refused as 'race'"
        ),
    ),
    Mutation(
        name="forced-site-below-the-threshold-is-refused",
        file="compiler/select/profitability.py",
        old="if forced is not None or not policy.is_below_threshold(sent):",
        new="if not policy.is_below_threshold(sent):",
        fault="min_bytes applies to sites whose strategy the user requests",
        tests=("tests/compiler/test_dispatch_table.py::test_floor_and_forced_tables", "tests/plan/test_saved.py"),
        note="overrides are tested with min_bytes=0 or above it: request 'pipelined' for a small site with the default",
    ),
    Mutation(
        name="threshold-of-a-table-is-one-row-late",
        file="compiler/select/dispatch_table.py",
        old="return (min_bytes * rows - 1) // sent if sent",
        new="return min_bytes * rows // sent if sent",
        fault="a call that sends exactly min_bytes is left alone",
        tests=("tests/compiler/test_dispatch_table.py::test_floor_and_forced_tables",),
        note=(
            "test_floor_and_forced_tables accepts any limit from (1 << 15) - 1 on: at 1 << 15 rows the table must not say none"
        ),
    ),
    Mutation(
        name="cutting-makes-a-matmul-faster",
        file="compiler/cost/predict.py",
        old="floor = max(sum(matmuls), pushes)",
        new="floor = pushes",
        fault="a pipelined site may be predicted faster than its matmuls alone",
        tests=("tests/cost/test_predict.py::test_never_below_the_floor",),
        note=(
            "in no measured profile are pieces faster than the whole: a profile of one fast small matmul would show the floor"
        ),
    ),
    Mutation(
        name="margin-of-complicated-strategies-is-ignored",
        file="compiler/cost/choice.py",
        old="if saved > margin_us(found[best].us, found[NONE]):",
        new="if saved > 0:",
        fault="a strategy replaces a simpler one for less than predictions err",
        tests=("tests/cost/test_predict.py::test_a_chosen_overlap_is_worth_it", "tests/cost/test_predict.py"),
        note=("test_a_chosen_overlap_is_worth_it finds no site that gains less than the margin: predictions by hand would"),
    ),
    Mutation(
        name="larger-group-may-be-faster",
        file="compiler/cost/fused_time.py",
        old="return max(0.0, us - base_us)",
        new="return us - base_us",
        fault="the plain collective of more ranks is assumed to be faster",
        tests=("tests/compiler/test_fused_choice.py::test_the_plain_form_of_more_ranks_is_no_faster",),
        note="no measured group is faster than a smaller one: swap two curves of a profile",
    ),
    Mutation(
        name="tuner-takes-the-fastest-rank",
        file="runtime/autotune.py",
        old='slowest = [max(rank["us"][index] for rank in ranks)',
        new='slowest = [min(rank["us"][index] for rank in ranks)',
        fault="a strategy is chosen by its fastest rank",
        tests=("tests/compiler/test_dispatch_table.py::test_tuning", "tests/runtime/test_exchange.py"),
        note=(
            "test_tuning has no rank that is slow with one strategy: two Tuners over a HashStore, with times by "
            "hand, would show it"
        ),
    ),
    Mutation(
        name="areas-grow-to-the-own-need",
        file="runtime/session/session.py",
        old='largest = max(int(need["needed"]) for need in needs)',
        new='largest = int(needs[exchange.rank]["needed"])',
        fault="ranks with other rows grow the areas of an all_to_all to other sizes",
        tests=("tests/runtime/test_all_to_all.py::test_the_first_call_of_a_site_grows_the_areas",),
        note="all ranks of test_the_first_call_of_a_site_grows_the_areas need as much",
    ),
    Mutation(
        name="the-least-silent-rank-is-blamed",
        file="csrc/cpu/waiter.cpp",
        old="return a.silent_ns > b.silent_ns;",
        new="return a.silent_ns < b.silent_ns;",
        fault="of several ranks that delay a group the wrong one is named",
        tests=("tests/runtime/test_blame.py",),
        note="in no case of test_blame do two ranks delay the group, one silent for longer than the other",
    ),
    Mutation(
        name="unneeded-amaxes-move-with-casts",
        file="compiler/fp8/hoist/gather_readers.py",
        old="if not (has_row_casts if granularity is Granularity.ROW else n in needed)",
        new="if granularity is not Granularity.ROW and n not in needed",
        fault="amaxes of rows that no cast reads count as scales",
        tests=("tests/fp8/test_insert.py::test_casts_after_a_gather",),
        note="in no graph of rank_hoist.py does something else read the amaxes of rows next to a cast per tensor",
    ),
    Mutation(
        name="kinds-of-sites-are-counted",
        file="compiler/reports/summary.py",
        old='text = f"{len(done)} of {len(plan.decisions)} collectives overlapped"',
        new='text = f"{len({d.kind for d in done})} of {len(plan.decisions)} collectives overlapped"',
        fault="the summary counts kinds of sites, not sites",
        tests=("tests/diff/test_outcome.py", "tests/compiler/test_explain.py"),
        note="no summary of the tests has two overlapped sites of one kind and mode",
    ),
)
