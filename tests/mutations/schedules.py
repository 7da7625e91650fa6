"""Faults of schedules: their builders, the checker and the reference executor."""

from __future__ import annotations

from .mutation import Mutation

PROVEN = "tests/schedule/test_builders.py::test_every_key_is_proven"
CHECKER = "tests/schedule/test_checker.py"

MUTATIONS = (
    Mutation(
        name="gather-consumes-down-the-ring",
        file="runtime/schedule/builders/pipelined_gather.py",
        old="batches = split(self.peers_up,",
        new="batches = split(self.peers_down,",
        fault="shards are awaited in the reverse of the order in which they arrive",
        tests=("tests/schedule/test_builders.py::test_gather_pushes_down_the_ring_and_consumes_up_the_ring",),
    ),
    Mutation(
        name="contraction-adds-to-nothing",
        file="runtime/schedule/builders/pipelined_gather.py",
        old="add = contracts and not first",
        new="add = contracts",
        fault="the first part of a sum over shards adds to memory that nothing wrote",
        tests=(PROVEN,),
    ),
    Mutation(
        name="sum-begins-with-the-own-shard",
        file="runtime/schedule/builders/reduction_phases.py",
        old="rank, source, lo, hi) for source in range(writer.key.ranks)",
        new="rank, source, lo, hi) for source in [rank, *writer.peers_up]",
        fault="ranks sum in different orders, so results differ in their last bits",
        tests=("tests/schedule/test_builders.py::test_sums_are_in_rank_order_on_every_rank", PROVEN),
    ),
    Mutation(
        name="push-after-the-first-term",
        file="runtime/schedule/builders/reduction_phases.py",
        old="record = computed if term == writer.key.terms - 1 else None",
        new="record = computed if term == 0 else None",
        fault="a sum of several matmuls is pushed before the last one is added",
        tests=("tests/schedule/test_builders.py::test_a_sum_of_several_matmuls_must_be_finished", PROVEN),
    ),
    Mutation(
        name="pieces-are-rounded-down",
        file="runtime/schedule/builders/schedule_writer.py",
        old="max(1, -(-key.chunks // key.ranks))",
        new="max(1, key.chunks // key.ranks)",
        fault="chunks that do not divide by the ranks are one piece less",
        tests=("tests/schedule/test_builders.py::test_chunks_are_pieces_of_the_whole", "tests/schedule/test_builders.py"),
    ),
    Mutation(
        name="op-returns-before-its-pushes",
        file="runtime/schedule/builders/schedule_writer.py",
        old="after = () if self.key.zero_copy else self.join()",
        new="after: tuple[int, ...] = ()",
        fault="an op returns while the copy engine still reads its input",
        tests=(PROVEN,),
    ),
    Mutation(
        name="zero-copy-finish-does-not-wait-for-its-pushes",
        file="runtime/schedule/builders/whole_collectives.py",
        old="writer.split(after=writer.join())",
        new="writer.split()",
        fault="the finish of a zero-copy gather returns while its shard is pushed",
        tests=(PROVEN, "tests/schedule/test_split.py"),
    ),
    Mutation(
        name="source-without-rows-is-asked-for-another-round",
        file="runtime/schedule/builders/all_to_all.py",
        old="sources = [peer for peer in writer.peers_up if of(peer, rank) > number]",
        new="sources = [peer for peer in writer.peers_up if of(peer, rank) >= number]",
        fault="a rank waits for one round more than is sent",
        tests=("tests/schedule/test_all_to_all.py",),
    ),
    Mutation(
        name="shards-land-on-each-other",
        file="runtime/schedule/builders/fused_collectives.py",
        old="Region(Buf.LANDING, peer, rank, index=shard))",
        new="Region(Buf.LANDING, peer, rank, index=0))",
        fault="all shards of a one-shot all_reduce are pushed to one place",
        tests=("tests/schedule/test_fused.py",),
    ),
    Mutation(
        name="checker-lets-calls-end-before-their-copies",
        file="runtime/schedule/checker.py",
        old="if node.step.queue is Queue.COPY:",
        new="if node.step.queue is Queue.COPY and key.is_split:",
        fault="the join rule is checked for split collectives only",
        tests=(f"{CHECKER}::test_join_rule",),
    ),
    Mutation(
        name="checker-allows-ready-of-an-earlier-call",
        file="runtime/schedule/happens_before.py",
        old="if wait.back < 0 or wait.back % distance or (wait.back > 0) != is_done:",
        new="if wait.back < 0 or wait.back % distance:",
        fault="a wait for data may look at an earlier call of the slot",
        tests=(f"{CHECKER}::test_flag_rules",),
    ),
    Mutation(
        name="checker-sorts-the-summands",
        file="runtime/schedule/symbolic_run.py",
        old='[("sum", *column) for column in columns]',
        new='[("sum", *sorted(column)) for column in columns]',
        fault="sums in any order of ranks are accepted",
        tests=(f"{CHECKER}::test_sums_out_of_rank_order_are_refused", "tests/schedule/test_fused.py"),
    ),
    Mutation(
        name="reference-executor-keeps-words-of-later-epochs",
        file="runtime/schedule/interpret.py",
        old="if wait.back == 0 and (held > epoch or (held == epoch and tag != run.site.tag)):",
        new="if wait.back == 0 and held > epoch:",
        fault="the tag of another site is accepted",
        tests=("tests/schedule/test_interpret.py::test_tags_tell_sites_apart",),
    ),
)
