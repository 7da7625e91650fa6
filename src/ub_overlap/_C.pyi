"""Types of the extension module, which csrc/bindings defines."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

class Arena:
    @property
    def slot_bytes(self) -> int: ...
    def bytes_of_slot(self, slot: int) -> int:
        """Return 0 for a split slot that no call has used."""
    def check(self) -> None:
        """Raise what a peer reported."""
    def watch(self) -> None:
        """End waits of a device for a rank that is gone or has failed, and tell other parts of the origin. For a watchdog."""
    def join_origin(self, key: str, name: str, ranks: Sequence[int]) -> None:
        """Make errors name ranks of the group `name`, of which the arena's group has `ranks`; all of them where empty."""
    def fail(self, error: BaseException, op: str, site: str) -> None:
        """Tell all ranks of the exception of this one, and whose fault it is, unless they know of a failure."""

class ShmArena(Arena):
    def __init__(self, rank: int, ranks: int, slot_bytes: int) -> None: ...
    @property
    def control_address(self) -> str: ...
    @property
    def data_address(self) -> str: ...
    def attach(self, rank: int, control_address: str, data_address: str, made_as: int = -1) -> str:
        """Return why this process cannot reach the peer's memory, "" where it can."""
    def grow_begin(self, slot_bytes: int, slot: int) -> None: ...
    def grow_attach(self, rank: int, data_address: str) -> None: ...
    def grow_commit(self) -> None: ...
    def grow_abort(self) -> None: ...
    def stop_sharing(self) -> None: ...
    def has_lost_peer(self) -> bool: ...
    def check(self, op: str, site: str) -> None:  # type: ignore[override]
        """Raise where a peer has failed or its process is gone."""

class CudaArena(Arena):
    """Defined in builds with CUDA only."""

    def __init__(self, device: int, host: ShmArena, words: Sequence[int], data: Sequence[int], slot_bytes: int) -> None: ...
    @property
    def is_captured(self) -> bool:
        """Whether a graph holds the slots' addresses."""
    def has_ended(self) -> bool:
        """Return whether every plain call of the group has ended on the device."""
    def can_free(self) -> bool:
        """Return whether memory of the arena can be freed now. Takes a second at most."""
    def replace(self, data: Sequence[int], slot_bytes: int, slot: int) -> None: ...

def words_bytes(ranks: int) -> int:
    """Return the bytes of symmetric memory that a rank needs besides its slots. Defined in builds with CUDA only."""

class ChannelSegment:
    """Host memory of a group's channels. `has_slots`: their slots lie there too (CPU)."""

    def __init__(self, rank: int, ranks: int, slots: int, near_bytes: int, far_bytes: int, has_slots: bool) -> None: ...
    @property
    def address(self) -> str: ...
    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots of a rank."""
    def attach(self, rank: int, address: str) -> str:
        """Return why this process cannot reach the peer's memory, "" where it can."""
    def stop_sharing(self) -> None: ...

class Transfer:
    """A message that was issued."""

    def is_completed(self) -> bool: ...
    def wait(self) -> None:
        """Wait for the message. CUDA: make the current stream wait for it."""

class PointToPoint:
    """The channels of a rank."""

    def issue(self, tensor: Any, sends: bool, peer: int, tag: int = 0) -> Transfer: ...
    def slot_bytes(self, peer: int) -> int:
        """Return the bytes of one slot for messages with that rank."""

class CpuPointToPoint(PointToPoint):
    def __init__(self, arena: Arena, segment: ChannelSegment) -> None: ...

class CudaPointToPoint(PointToPoint):
    """Defined in builds with CUDA only."""

    def __init__(self, arena: CudaArena, segment: ChannelSegment, memory: Sequence[int]) -> None: ...

def channel_bytes(segment: ChannelSegment) -> int:
    """Return the bytes of symmetric memory that the channels of a rank need. Defined in builds with CUDA only."""

def channel_words_bytes(segment: ChannelSegment) -> int:
    """Return how many of them, from the first on, must be zero before any rank uses them. With CUDA only."""

def find_channels(group: str, device: str) -> PointToPoint | None:
    """Return the channels of a group, None before they are set up."""

def set_connect(connect: Callable[[str, str, int], PointToPoint | None]) -> None:
    """Set the callable (group, device, bytes) that makes channels, or returns None without transport."""

def use_channels(group: str) -> None:
    """Replace the backends of a c10d group by ones that send and receive through channels."""

class ForwardUses:
    """Whether backward may reuse the cached cast of a weight."""

    def __init__(self) -> None: ...
    @property
    def count(self) -> int: ...
    def can_reuse(self, reuse_forward: bool, in_capture: int = 0) -> bool: ...
    def record(self, reuse_forward: bool, in_capture: int = 0) -> None: ...

class HostWork:
    """A plain collective on the CPU between start and finish."""

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for its end. RuntimeError after the timeout, or where it failed."""

    def is_completed(self) -> bool: ...

class SparedMultiprocessors:
    """Multiprocessors that matmuls leave to one collective."""

    def begin(self, count: int) -> None: ...
    def end(self) -> None: ...

def install_plain(
    wait_on_host: Callable[[HostWork, str, str, str], None], fail_plain: Callable[[str, str, str, str, str], None]
) -> None: ...

class Session:
    def __init__(
        self, group: str, device: str, rank: int, ranks: int, arena: Arena | None, transport: str, reason: str
    ) -> None: ...
    @property
    def group(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def transport(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    def open_plain(self) -> list[int]:
        """Return the split slots whose collective c10d runs now."""

    def set_channels(self, channels: PointToPoint) -> None: ...
    @property
    def failure_text(self) -> str:
        """The error that made the session unusable, or ""."""
    def check(self) -> None:
        """Raise the first error so far."""
    @property
    def calls(self) -> int: ...
    def flight(self) -> list[tuple[int, int, str, str, str, str, str, int, int, int]]:
        """Return the calls that the flight recorder keeps, oldest first (runtime/session/flight.py: FIELDS)."""
    def waiting_for(self) -> list[int]: ...
    def abort(self, reason: str) -> None:
        """End the session's waits here and on its peers. Idempotent, from any thread."""
    def close(self) -> None: ...

_Provide = Callable[[tuple[Any, ...], int], Sequence[Sequence[int]]]
"""(key, rank) -> encoded schedule."""

def install(
    provide: _Provide,
    bind: Callable[[str, str, int, str, str], Any],
    fallback: Callable[..., Any],
    make_error: Callable[[str, dict[str, str]], BaseException],
    on_error: Callable[[BaseException], None],
    warn: Callable[[str], None],
) -> None:
    """Set the callbacks into Python: schedules, sessions, c10d fallbacks, errors, what is done before one, and warnings."""

def set_provider(provide: _Provide) -> None:
    """Replace the schedule provider and forget its schedules."""

def set_step_timeout(seconds: float, /) -> None: ...
def set_replay(on: bool, /) -> None:
    """Set whether repeated calls are recorded and replayed (CUDA)."""

def set_flight_calls(calls: int, /) -> None: ...
def catch_dump_signal() -> bool: ...
def release_dump_signal() -> None: ...
def take_dump_signal() -> bool: ...
def add_matmul_algorithms(device: int, chosen: Mapping[str, bytes]) -> None:
    """Use these algorithms of cuBLASLt from now on: key of a matmul -> bytes."""

def matmul_algorithms(device: int) -> dict[str, bytes]:
    """Return the algorithms in use that a search has chosen."""

def clear_matmul_algorithms() -> None:
    """Use the library's first proposals again."""

def matmul_problems() -> list[tuple[str, str, int, bool, bool, list[tuple[str, str, int, int]]]]:
    """Return (key, text, uses, has a chosen algorithm, stores at peers, buffers) of each matmul that has run.

    `buffers`: (name, dtype, bytes, alignment). On the current device. Defined in builds with CUDA only, as are the three
    functions below.
    """

def propose_matmul_algorithms(key: str, count: int) -> list[bytes]:
    """Return up to `count` algorithms in the order of the library's estimate."""

def run_matmul_algorithm(key: str, algorithm: bytes, buffers: Mapping[str, int], workspace: int, stream: int) -> None:
    """Enqueue a matmul by an algorithm, on buffers of matmul_problems' sizes and alignments."""

def blas_version() -> int:
    """Return the version of cuBLASLt that is loaded."""

def set_trace(on: bool, /) -> None:
    """Set whether the step times of each site's last call are kept."""

def set_nccl_multiprocessors(count: int, /) -> None:
    """Set how many multiprocessors matmuls leave to a split collective of NCCL."""

def set_nvtx(on: bool, /) -> None:
    """Set whether calls are NVTX ranges, where torch has NVTX."""

def site_stats() -> dict[str, dict[str, Any]]: ...
def clear_stats() -> None: ...
def last_trace(site: str) -> list[tuple[int, str, str, int, int, int]]:
    """Return (step, queue, kind, begin_ns, end_ns, bytes) for each step of the site's last traced call."""

def show_wait(key: str) -> None:
    """Show peers in the arenas of an origin group that this rank waits for a collective of c10d."""

def sessions() -> list[Session]: ...
def set_inherited_groups(names: Sequence[str]) -> None:
    """Refuse these groups in a forked child: they are its parent's."""

def generation() -> int:
    """Return how many sessions this process has made."""

def close(group: str, device: str, /) -> None: ...
def close_all() -> None: ...
def has_destroyed_groups() -> bool:
    """Return whether a session's group was destroyed."""

def close_destroyed_groups() -> None:
    """Close the sessions of destroyed groups. Waits for their running calls."""

slots: int
"""Arena slots per rank; runtime/schedule/steps.py has the same number."""
split_slots: int
fused_slots: int
"""Slots of split collectives per rank; likewise."""

def build_info() -> dict[str, Any]:
    """Return version, torch, cuda (a bool) and compiler."""

class testing:
    """Hooks for tests: a submodule."""

    float8_numbers: tuple[float, float, float]
    """The kernels' least scale, and the largest e4m3 and e5m2 numbers."""

    @staticmethod
    def set_latches(latches: Sequence[tuple[int, int]]) -> None:
        """(i, j): matmul i of a call and its copy j must run at the same time."""
    @staticmethod
    def set_random_delay(max_us: int, seed: int = 0) -> None:
        """Delay every step by up to max_us microseconds; 0 turns it off."""
    @staticmethod
    def set_step_delays(delays_us: Mapping[int, int], only_rank: int = -1) -> None:
        """Delay step n of every schedule by so many microseconds, on one rank or on all (-1)."""
    @staticmethod
    def set_interrupted_allocation(bytes: int) -> None: ...
    @staticmethod
    def set_host_id(id: str, /) -> None:
        """Pretend to be on this host; "" is the true one."""
    @staticmethod
    def host_id() -> str: ...
    @staticmethod
    def count_ranges(on: bool) -> None:
        """Record NVTX ranges instead of pushing them to torch's, which only CUDA builds have."""
    @staticmethod
    def ranges() -> list[str]:
        """Return the name of each push since count_ranges(True), and "" for each pop."""
    @staticmethod
    def reset() -> None: ...
    @staticmethod
    def time_flight_recorder(calls: int, sites: int) -> float:
        """Return the nanoseconds of host time to record one call."""
    @staticmethod
    def hold_group_lock(arena: CudaArena, /) -> None:
        """Take the group's lock on the device, as a call that never ends. Defined in builds with CUDA only."""
    @staticmethod
    def provider_calls() -> int:
        """Return how often the schedule provider was called."""
    @staticmethod
    def clear_programs() -> None: ...
    @staticmethod
    def set_mirrored(on: bool) -> None:
        """Accept schedules that signal in the name of other ranks (benchmarks/mirror), and forget all schedules."""
    class FusedAlone:
        """Rank 0 of a group on one GPU whose peers are all itself. Defined in builds with CUDA only."""

        def __init__(self, ranks: int) -> None: ...
        def run(
            self,
            input: int,
            output: int,
            rows: int,
            row_bytes: int,
            residual: int = 0,
            weight: int = 0,
            normed: int = 0,
            *,
            stream: int,
        ) -> None:
            """Enqueue a one-shot all_reduce of bf16 rows, with residual and RMSNorm where `normed` is given."""
        def has_failed(self) -> bool: ...

    @staticmethod
    def run_copy(src: int, src_stride: int, dst: int, dst_stride: int, blocks: int, bytes: int, stream: int | None) -> None:
        """Copy `blocks` runs of `bytes` bytes by the executor's kernel. `stream` None: the CPU's."""
    @staticmethod
    def run_sum(
        sources: Sequence[tuple[int, int]],
        dtype: str,
        dst: int,
        dst_stride: int,
        dst_dtype: str,
        blocks: int,
        elements: int,
        divisor: float,
        stream: int | None,
    ) -> None:
        """Add up sources (address, stride in bytes) in fp32, in their order, and divide. `stream` None: on the CPU."""
    @staticmethod
    def block_positions(blocks: int, per_block: int, numbers: Sequence[int]) -> list[tuple[int, int]]: ...
    @staticmethod
    def blocks_at_once(per_block: int) -> int: ...
    @staticmethod
    def use_recent_map(capacity: int, keys: Sequence[int]) -> tuple[list[int], list[int]]:
        """Use the keys in turn and return those evicted, then those left."""
