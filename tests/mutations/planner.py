"""Faults of the planner, of calibration and of the reader of traces."""

from __future__ import annotations

from .mutation import Mutation

MUTATIONS = (
    Mutation(
        name="gradient-leaves-behind-the-weights",
        file="tools/planner/pipeline_run.py",
        old="end = played.begin_us + self.input_us",
        new="end = played.end_us",
        fault="a send in front of weight gradients leaves at their end",
        tests=("tests/plan/test_pipeline.py::test_a_send_before_weight_gradients_leaves_them_out_of_the_bubble",),
    ),
    Mutation(
        name="activations-in-flight-at-the-end",
        file="tools/planner/pipeline_run.py",
        old="most = max(most, held)",
        new="most = held",
        fault="the activations that a rank holds are counted at the end of a step",
        tests=("tests/plan/test_pipeline.py::test_activations_in_flight",),
    ),
    Mutation(
        name="warm-up-of-1f1b-is-one-forward-short",
        file="tools/planner/pipeline_orders.py",
        old="warm = min(microbatches, ranks - rank)",
        new="warm = max(1, min(microbatches, ranks - rank - 1))",
        fault="1F1B begins with one forward less than the stages behind it need",
        tests=("tests/plan/test_pipeline.py",),
    ),
    Mutation(
        name="taken-matmuls-are-counted-twice",
        file="tools/planner/planned_step.py",
        old="taken = {m for o in plan.decisions if o.overlapped for m in o.matmuls}",
        new="taken = {m for o in plan.decisions if not o.overlapped for m in o.matmuls}",
        fault="a matmul counts in a site that is left alone, not where it runs",
        tests=("tests/plan/test_planner.py::test_matmuls_count_where_they_run",),
    ),
    Mutation(
        name="message-of-the-whole-sequence",
        file="tools/planner/planned_pipeline.py",
        old="size = sizes.batch * sizes.seq // (sizes.cp * sizes.tp) * sizes.hidden",
        new="size = sizes.batch * sizes.seq // sizes.cp * sizes.hidden",
        fault="a message counts the rows of all ranks of tensor parallelism",
        tests=("tests/plan/test_pipeline.py",),
    ),
    Mutation(
        name="ending-a-call-costs-nothing",
        file="tools/calibrate/fit.py",
        old="steps=replace(profile.steps, begin_us=half, end_us=half, **small)",
        new="steps=replace(profile.steps, begin_us=half, end_us=0.0, **small)",
        fault="calibration fits the begin of a call only",
        tests=("tests/cost/test_profile.py::test_fit_finds_the_costs_that_whole_calls_show",),
    ),
    Mutation(
        name="rates-follow-short-matmuls",
        file="tools/calibrate/fit.py",
        old="longest = sorted(rows, key=lambda row: row[5])[len(rows) // 3 :]",
        new="longest = sorted(rows, key=lambda row: row[5])[: len(rows) // 3]",
        fault="rates are fitted to matmuls that launches dominate",
        tests=("tests/cost/test_profile.py::test_rates_follow_what_was_measured",),
    ),
    Mutation(
        name="hidden-communication-is-called-exposed",
        file="tools/exposed.py",
        old="exposed_us=total(exposed),",
        new="exposed_us=total(moving),",
        fault="a trace shows all communication as exposed",
        tests=("tests/diff/test_tools.py",),
    ),
)
