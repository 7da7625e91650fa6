"""The schedule language: what one rank does for one strategy, as data.

Legend: R ranks of the group; a *shard* is one rank's share of the split dimension; a *piece* is an interval ``[lo, hi)``
of a shard, in fractions of it; e is the epoch, the number of the call on its group.

A `Schedule` is a list of steps in issue order. Every step is on one named queue. Steps of a queue run one after the other.
Queues run concurrently and synchronize only through events (within a rank) and flags (between ranks).

A schedule has no sizes: pieces are fractions. So one schedule serves every shape and is proven once. The executor turns
fractions into rows, ``floor(m * lo) .. floor(m * hi)``. That map is monotone: disjoint fractions stay disjoint rows and a cover
stays a cover, also when m does not divide or is smaller than the number of pieces.

Four parts read this file: the checker (`checker.py`), the executors (csrc), the cost model's simulator and `describe.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from fractions import Fraction

ZERO, ONE = Fraction(0), Fraction(1)
SLOTS = 2
"""Arena slots per rank, used in turn: slot = epoch modulo SLOTS. Must equal `slots` in csrc/core/flags.h."""
SPLIT_SLOTS = 12
"""Further slots per rank, for split collectives: as many may be open at once. Must equal `split_slots` in csrc/core/flags.h."""
PLAN_SLOTS = range(8)
"""The split slots that compiled plans assign, from 0 up."""
HANDLE_SLOTS = range(len(PLAN_SLOTS), SPLIT_SLOTS)
"""The split slots of eager handles (runtime/functional/handles.py)."""
MAX_AREAS_BYTES = 1 << 30
"""Bytes of all areas of an all_to_all in a slot, at most. Must equal `max_areas_bytes` in csrc/core/area_growth.h."""

FUSED_SLOTS = 2
"""Slots behind those, used in turn by fused collectives: slot = epoch modulo FUSED_SLOTS. Must equal `fused_slots` there."""
FUSED_SLOT = SLOTS + SPLIT_SLOTS
"""The first of these. It stands for the memory of all of them."""


class Queue(IntEnum):
    """The queue of a step.

    COMPUTE is the caller's stream (or thread). COPY is the device's one copy-engine queue, shared by all groups of the process.
    """

    COMPUTE = 0
    COPY = 1


class Buf(IntEnum):
    """The buffers of one call.

    =========  ===========  ================================================================================
    name       lives in     holds
    =========  ===========  ================================================================================
    INPUT      user tensor  the collective's input: the local shard (gathers), R shards (bulk scatters, reduces)
    PARTIAL    user tensor  R shards of this rank's unreduced product, shard s belongs to rank s (not in a direct call)
    LANDING    arena slot   R shards; shard s was sent by rank s. Symmetric: peers write it.
                            In an all_to_all shard s is the area of rank s: its rounds (`index`) land in the same place
                            In a one-shot all_reduce every rank sends all of its shards: `index` is the shard
    LANDING2   arena slot   R shards; the second phase of an all_reduce
    OUTPUT     user tensor  the collective's result: R shards (gathers, reduces) or one shard, number 0 (scatters)
    RESULT     user tensor  product of consumer j (`Compute.index`): R shards, or one (number 0) when it accumulates;
                            behind the consumers' the products of the independent matmuls: one shard, number 0
    OPERAND    user tensor  matmul operands that no step of the schedule writes (not checked for races)
    =========  ===========  ================================================================================
    """

    INPUT = 0
    PARTIAL = 1
    LANDING = 2
    LANDING2 = 3
    OUTPUT = 4
    RESULT = 5
    OPERAND = 6

    @property
    def in_arena(self) -> bool:
        """The buffer is in an arena slot."""
        return self in (Buf.LANDING, Buf.LANDING2)


class Part(IntEnum):
    """The part of a schedule that one op issues: all of it, or one op of a split collective.

    RELEASE is empty but for zero-copy gathers.
    """

    WHOLE = 0
    START = 1
    FINISH = 2
    RELEASE = 3


class FlagKind(IntEnum):
    """READY: piece `index` of `source` has landed. READY2: the same for LANDING2; in an all_to_all: `source` has copied out the
    round before round `index`, which may be pushed now. DONE: `source` has finished reading its own arena slot of that epoch,
    so peers may write it again."""

    READY = 0
    DONE = 1
    READY2 = 2


@dataclass(frozen=True, slots=True)
class Region:
    """The piece ``[lo, hi)`` of one shard of one buffer in the memory of `rank` (a rank of the group).

    `index` is the consumer of a RESULT buffer, the shard in LANDING of a one-shot all_reduce, the round in LANDING of an
    all_to_all, and 0 everywhere else. In an all_to_all shard p is the piece of peer p: sent to it (INPUT) or by it. Shards may
    differ in rows (an all_reduce of rows that R does not divide). A shard then has the rows of the rank that finally owns it:
    LANDING of a scatter phase and OUTPUT of a reduce_scatter hold shards of the rank whose memory they are in
    (`op_contract.extent`).
    """

    buf: Buf
    rank: int
    shard: int
    lo: Fraction = ZERO
    hi: Fraction = ONE
    index: int = 0


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag word. It is in the memory of `rank`, only `source` writes it, and it holds (epoch, site tag).

    Each (kind, slot, source, index) has its own word. The slot is epoch modulo SLOTS, or the split slot of a split collective.
    So a READY word is written again only after DONE of the previous epoch that used the slot.
    """

    kind: FlagKind
    rank: int
    source: int
    index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step on `queue`. `after`: events (numbers that other steps `record`) that must have happened first. `record`: the event
    number that this step sets at its end, or None. Events are local to a rank and to a call."""

    queue: Queue
    after: tuple[int, ...] = ()
    record: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy(Step):
    """Copy `src` to `dst`; `dst.rank` may be a peer (a push). On COMPUTE it is a local copy by the compute units, on COPY one
    by the driver, which may run concurrently with a matmul."""

    src: Region
    dst: Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal(Step):
    """Write this call's (epoch, site tag) to `flag`, after everything before it on its queue (release)."""

    flag: Flag


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait(Step):
    """Wait (acquire) until `flag`, in this rank's memory, holds epoch e - `back`.

    back=0 also compares the site tag. Waits for an epoch before the group's first call are satisfied at once. READY and READY2
    waits have back=0. DONE waits have a multiple of SLOTS: their tag is not compared, so they only order earlier calls. The
    calls of a split slot are counted by themselves, so DONE waits of a split collective have back=1.
    """

    flag: Flag
    back: int = 0


class ComputeKind(IntEnum):
    """The computation of a Compute step. The executors refuse other kinds."""

    MATMUL = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute(Step):
    """One matmul of consumer (gathers) or term (scatters, reduces) `index`, restricted to one piece. Or an independent matmul,
    which writes RESULT `index` (`Key.is_independent`).

    `reads`: the pieces of INPUT or LANDING that are its gathered operand (empty when all operands are OPERANDs).
    `writes`: the pieces of RESULT or PARTIAL that it produces. In a direct call they are pieces of LANDING in the memory of
    the ranks that own them. A write to a peer is a push.
    `accumulate`: add to `writes` instead of storing: term > 0 of a sum of products, or a further shard of a contraction. A
    contraction writes all of RESULT shard 0 at every step. One that reads the full gathered matrix in one step rounds by
    itself, so it needs no Finish.
    `gates`: flags that the kernel itself waits for before its loads. No builder uses them yet; the checker supports them.
    """

    index: int
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]
    accumulate: bool = False
    gates: tuple[Wait, ...] = ()
    kind: ComputeKind = ComputeKind.MATMUL


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduce(Step):
    """`dst` = sum over `srcs` in list order, accumulated in fp32 (in the data's own type where that is wider)."""

    srcs: tuple[Region, ...]
    dst: Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish(Step):
    """Round the fp32 accumulator of contraction consumer `index` to the result's type: a read and a write of RESULT."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Return(Step):
    """The op `start` of a split collective returns here, and `finish` issues the later steps. The `finish` of a zero-copy
    gather returns at the second one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round(Step):
    """Begins a further round of an all_to_all, or ends the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release(Step):
    """The first step of `release`: the caller has read `reads`, the result of a zero-copy gather, for the last time."""

    reads: tuple[Region, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opaque(Step):
    """A step that only declares its effects: an NCCL call, later a fused kernel. `waits` and `signals` happen inside it.

    `cost_us`: declared duration in microseconds, for the simulator.
    """

    name: str
    cost_us: float = 0.0
    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()
    waits: tuple[Wait, ...] = ()
    signals: tuple[Signal, ...] = ()


@dataclass(frozen=True, slots=True)
class Key:
    """Everything a schedule depends on. Equal keys give equal schedules, so it is also the cache key in C++.

    kind: "all_gather_matmul" | "matmul_reduce_scatter" | "matmul_all_reduce" | "bulk_all_gather" | "bulk_reduce_scatter" |
    "bulk_all_reduce" | "split_all_gather" | "split_reduce_scatter" | "split_all_reduce" | "split_all_to_all" |
    "one_shot_all_gather" | "one_shot_reduce_scatter" | "one_shot_all_reduce" | "two_shot_all_reduce".
    chunks: pieces that the split dimension is cut into over the whole group (0: one per rank). Of an all_to_all: rounds.
    contracts: one bool per consumer, True where its matmul contracts over the gathered dimension.
    terms: matmuls summed before a scatter or reduce. independent: matmuls that neither read nor feed the collective; their
    RESULTs are behind the consumers'. A bulk op has no other matmuls. shard_dim_is_last: shards cannot be cut, because a
    piece would not be a block of rows; chunks is then at most R.
    keep: the gathered tensor (gathers) is an output too. striped (scatters): every matmul makes one
    piece of every shard, instead of all of some shards; chunks then counts the pieces of a shard.
    direct (scatters of one term): one matmul stores each shard in the memory of its owner, and nothing is copied.
    zero_copy (split gathers): LANDING itself is the result, until the op `release`.
    engine_copies (pipelined gathers): local copies run on COPY, behind the pushes, concurrently with the matmuls.
    """

    kind: str
    ranks: int
    chunks: int = 0
    contracts: tuple[bool, ...] = ()
    terms: int = 0
    independent: int = 0
    shard_dim_is_last: bool = False
    keep: bool = False
    striped: bool = False
    direct: bool = False
    zero_copy: bool = False
    engine_copies: bool = False

    @property
    def is_split(self) -> bool:
        """The op is cut into a start, a finish and, if it is zero-copy, a release, with other calls between them."""
        return self.kind.startswith("split_")

    @property
    def is_all_to_all(self) -> bool:
        """The pieces of each pair of ranks have sizes of their own."""
        return self.kind == "split_all_to_all"

    @property
    def parts(self) -> tuple[Part, ...]:
        """The ops that issue the schedule, in order."""
        if not self.is_split:
            return (Part.WHOLE,)
        return (Part.START, Part.FINISH, Part.RELEASE) if self.zero_copy else (Part.START, Part.FINISH)

    @property
    def collected_in(self) -> Buf:
        """The buffer in which a gather returns the gathered tensor."""
        return Buf.LANDING if self.zero_copy else Buf.OUTPUT

    @property
    def is_channel(self) -> bool:
        """The schedule is that of a channel, whose calls are pieces of messages. It has slots and flags of its own."""
        return self.kind == "point_to_point"

    @property
    def is_fused(self) -> bool:
        """The op is a fused collective: one kernel, with slots of its own."""
        return self.kind.startswith(("one_shot_", "two_shot_"))

    @property
    def lands_all_shards(self) -> bool:
        """Every rank sends all of its shards to all peers."""
        return self.kind == "one_shot_all_reduce"

    @property
    def is_gather(self) -> bool:
        """The collective is an all_gather."""
        return self.kind == "all_gather_matmul" or self.kind.endswith("_all_gather")

    @property
    def returns_gathered(self) -> bool:
        """The gathered tensor is an output."""
        return self.is_gather and (self.keep or self.kind != "all_gather_matmul")

    @property
    def slot_distance(self) -> int:
        """Epochs from one use of a slot to the next."""
        return 1 if self.is_split else FUSED_SLOTS if self.is_fused else SLOTS

    @property
    def independent_indices(self) -> range:
        """The RESULTs of the independent matmuls."""
        return range(len(self.contracts), len(self.contracts) + self.independent)

    def is_independent(self, step: Compute) -> bool:
        """Return whether `step` is an independent matmul: only they and consumers write RESULT."""
        return step.writes[:1] != () and step.writes[0].buf is Buf.RESULT and step.writes[0].index in self.independent_indices


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps of `rank` for `key`, in issue order. Each part of a split collective but the last ends with a `Return`.

    A rank issues each record or signal before the steps that wait for it. So one host thread can issue the schedule to any
    number of queues.
    """

    key: Key
    rank: int
    steps: tuple[Step, ...] = field(default_factory=tuple)

    def places(self, part: Part) -> range:
        """Return the numbers of the steps of `part`. Each `Return` of a split collective ends a part."""
        if part is Part.WHOLE:
            return range(len(self.steps))
        count = len(self.steps)
        cuts = [0, *(i + 1 for i, step in enumerate(self.steps) if isinstance(step, Return)), count, count, count]
        return range(cuts[part - 1], cuts[part])
