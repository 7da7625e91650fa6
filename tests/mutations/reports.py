"""Faults of plans, reports, diffs, overrides and the command line."""

from __future__ import annotations

from .mutation import Mutation

PLAN = "tests/compiler/test_plan.py"

MUTATIONS = (
    Mutation(
        name="packs-are-no-part-of-the-digest",
        file="compiler/plan/plan.py",
        old='"wire_dtype": d.wire_dtype, "scale": d.scale, "packs": list(d.packs),',
        new='"wire_dtype": d.wire_dtype, "scale": d.scale,',
        fault="ranks that pack other matmuls have equal plans",
        tests=("tests/compiler/test_pack_choice.py::test_packs_are_part_of_the_digest", PLAN),
    ),
    Mutation(
        name="graph-is-named-after-its-scales",
        file="compiler/plan/plan.py",
        old="own = [d for d in self.decisions if d.reason is not Reason.SCALES and d.strategy.mode is not Mode.MERGED]",
        new="own = [d for d in self.decisions if d.strategy.mode is not Mode.MERGED]",
        fault="float8 changes the name of a graph",
        tests=(f"{PLAN}::test_the_graph_is_named_whatever_is_float8",),
    ),
    Mutation(
        name="stored-plan-forgets-what-backward-keeps",
        file="compiler/plan/decision.py",
        old='kept=SavedActivation(**d["kept"]) if d.get("kept") else None,',
        new="kept=None,",
        fault="a plan that is read again has lost the form of a saved activation",
        tests=(f"{PLAN}::test_json_round_trip",),
    ),
    Mutation(
        name="saved-bytes-without-the-first-site",
        file="compiler/reports/summary.py",
        old="if saved := sum(d.saved_bytes or 0 for d in plan.decisions):",
        new="if saved := sum(d.saved_bytes or 0 for d in plan.decisions[1:]):",
        fault="the summary leaves the savings of a site out",
        tests=("tests/compiler/test_reduce_dtype.py",),
    ),
    Mutation(
        name="report-counts-earlier-calls",
        file="compiler/reports/report.py",
        old="calls = now.calls - (before.calls if before else 0) if now else 0",
        new="calls = now.calls if now else 0",
        fault="explain shows calls that were made before it",
        tests=("tests/compiler/test_explain_again.py", "tests/compiler/test_explain.py"),
    ),
    Mutation(
        name="sites-without-a-prediction-are-not-told",
        file="compiler/reports/outlook.py",
        old="unknown=len(outlooks) - len(known),",
        new="unknown=0,",
        fault="totals leave out how many sites have no prediction",
        tests=("tests/plan/test_predictions.py::test_totals",),
    ),
    Mutation(
        name="sites-begin-behind-both-lanes",
        file="compiler/reports/timeline.py",
        old="begin += max(lane.us for lane in own)",
        new="begin += sum(lane.us for lane in own)",
        fault="a timeline has gaps between its sites",
        tests=("tests/plan/test_predictions.py::test_sites_follow_each_other_in_a_timeline",),
    ),
    Mutation(
        name="first-rule-wins",
        file="compiler/overrides/rule.py",
        old="for rule in reversed(rules):",
        new="for rule in rules:",
        fault="the first rule that matches wins, not the last",
        tests=("tests/plan/test_rules.py::test_last_matching_rule_wins_and_auto_gives_back",),
    ),
    Mutation(
        name="first-pattern-wins",
        file="compiler/overrides/override_set.py",
        old="for pattern, strategy in reversed(self.patterns):",
        new="for pattern, strategy in self.patterns:",
        fault="the first pattern that matches wins, not the last",
        tests=("tests/compiler/test_options.py::test_last_matching_pattern_wins",),
    ),
    Mutation(
        name="middle-site-is-never-tried",
        file="src/ub_overlap/cli/bisect.py",
        old="for part in (suspects[:middle], suspects[middle:])",
        new="for part in (suspects[:middle], suspects[middle + 1 :])",
        fault="bisect leaves one site out of both halves",
        tests=("tests/cli/test_bisect.py::test_find_bad_sites",),
    ),
    Mutation(
        name="young-files-are-cleared",
        file="src/ub_overlap/cli/cache.py",
        old="files = [f for f in files if f.modified <= before]",
        new="files = [f for f in files if f.modified >= before]",
        fault="clear-cache --older-than removes what is younger",
        tests=("tests/cli/test_clear_cache.py::test_age",),
    ),
    Mutation(
        name="one-of-two-ranks-is-odd",
        file="src/ub_overlap/cli/flight.py",
        old="return odd if votes > len(odd) else sorted(texts)",
        new="return odd if votes >= len(odd) else sorted(texts)",
        fault="of two ranks that disagree one is blamed",
        tests=("tests/cli/test_flight.py::test_two_ranks_that_disagree",),
    ),
    Mutation(
        name="secret-flags-stay",
        file="src/ub_overlap/cli/redact.py",
        old='\\s+[\\"\']?)(?!-){_VALUE}"',
        new='\\s+[\\"\']?)(?=-){_VALUE}"',
        fault="a bundle has the value of --api-key",
        tests=("tests/cli/test_bundle.py::test_redaction",),
    ),
)
