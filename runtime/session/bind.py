"""Bind a group: its ranks find each other, agree on a transport and share memory, all through the group's c10d Store.

C++ calls `bind` at the group's first call. Each step is one exchange with the init deadline:

    hosts       host, GPU, builds, requested slot size   -> transport (topology.py)
                a hierarchical collective's group        -> its backends (host_groups.py)
                CUDA: digest of stored algorithms        -> the ranks use them if all read the same
    links       CUDA: each GPU's access to the others
    arena       addresses of the shared memory           -> attach to all peers'
    attached    why a peer's memory cannot be reached    -> plain c10d on all ranks if any rank has a reason
    allocated   CUDA: size of the allocated slots        -> torch's rendezvous
    ready       nothing                                  -> all flag words are zero
"""

from __future__ import annotations

import logging
import secrets
import time
import weakref
from collections.abc import Sequence
from typing import Any

from ub_overlap import _torch_compat

from .. import errors, settings
from ..extension import extension
from ..matmul_algorithms import loading as matmul_algorithms
from ..site_id import SiteId
from . import abort_signal, host_groups, origin_sessions, plan_announcements, topology, watchdog
from .arena_size import SIZE_STEP, round_slot_bytes
from .host import has_ended, host_id
from .plan_check import check_group_size
from .presence import watch_processes
from .session import Session
from .store_exchange import Exchange

log = logging.getLogger(__name__)

_LATE_S = 2.0
"""Seconds after which a peer whose memory cannot be mapped, and whose pid is unknown here, has died: it may also be on another
host with an equal id, as clones of a virtual machine are, and then it answers at once."""
_requested: dict[tuple[str, str], int] = {}
_sessions: weakref.WeakValueDictionary[tuple[str, str], Session] = weakref.WeakValueDictionary()


def request_slot_bytes(group: str, device: str, slot_bytes: int) -> None:
    """Set the initial slot size of `group`, in case its next call is its first."""
    _requested[group, device] = slot_bytes


def clear_request(group: str, device: str) -> None:
    """Drop the request: the group was bound before."""
    _requested.pop((group, device), None)


def find_session(group: str, device: str) -> Session | None:
    """Return the newest session of `group` in this process, None where it is gone."""
    return _sessions.get((group, device))


def arena_bytes() -> int:
    """Return the bytes that all sessions of this process have for landing memory. torch's memory statistics miss them."""
    return sum(session.arena_bytes for session in list(_sessions.values()))


def bind(group: str, device: str, slot_bytes: int, op: str, site: str) -> Session:
    """Make the session of a group together with its other ranks. PeerTimeoutError names ranks that do not arrive."""
    process_group = _torch_compat.group_of(group)
    rank, ranks = process_group.rank(), process_group.size()
    slot_bytes = max(slot_bytes, _requested.pop((group, device), 0))
    abort = abort_signal.new_signal(group, device, process_group, f"{op} at site '{site}'")
    if ranks == 1:
        check_group_size(group, ranks, site)  # such a session runs without plan checks
        session = _make_session(group, device, rank, ranks, None, None, "local", "a group of one rank")
    else:
        watchdog.start()  # for SIGUSR1 while this rank waits for the others
        store, origin = host_groups.store_of(process_group), host_groups.origin_of(process_group)
        exchange = Exchange(store, group, device, rank, ranks, op, site, abort, origin)
        try:
            session = _bind_ranks(exchange, device, slot_bytes)
        except BaseException as error:  # also Ctrl-C: the peers need not wait for this rank
            exchange.fail_with(error)
            if exchange.is_part and isinstance(error, errors.RankError):
                origin_sessions.tell(exchange, error)
            raise
    session.abort = abort
    abort.attach(session.core)
    _sessions[group, device] = session
    if ranks > 1:
        watchdog.watch(session)
    _log_session(session)
    return session


def _log_session(session: Session) -> None:
    """Log one line per group: rank, device, transport, memory and deadline."""
    core = session.core
    device = core.device
    if device == "cuda":
        from . import symm_mem

        device = symm_mem.device_label()
    text = f"group '{core.group}' on {device}: rank {core.rank} of {core.ranks}, transport {core.transport}"
    if session.slot_bytes:
        text += f", {session.slot_bytes} bytes per slot, {session.arena_bytes} bytes of arena"
    if core.transport == "c10d":
        text += f" (plain collectives, because {core.reason})"
    log.info("%s, deadline %g s", text, settings.current().step_timeout_s)


def _make_session(
    group: str, device: str, rank: int, ranks: int, exchange: Exchange | None, arena: Any, transport: str, reason: str
) -> Session:
    memory = getattr(arena, "core", arena)
    core = extension().Session(
        group=group, device=device, rank=rank, ranks=ranks, arena=memory, transport=transport, reason=reason
    )
    return Session(core, exchange, arena)


def _bind_ranks(exchange: Exchange, device: str, slot_bytes: int) -> Session:
    """Choose the transport and set up its memory, in step with all ranks."""
    group, rank, ranks = exchange.group, exchange.rank, exchange.ranks
    doing = f"the first call of {exchange.label}"
    hosts = _exchange_hosts(exchange, device, slot_bytes, doing)
    host_groups.complete(group, exchange.prefix, f"{exchange.op} at site '{exchange.site}'", exchange.abort)
    choice = topology.choose_transport(_exchange_topology(exchange, device, hosts, doing))
    if choice.unknown:
        pairs = _describe_pairs(choice.unknown)
        log.info("group '%s': links between ranks %s are unknown and assumed good", group, pairs)
    if choice.transport == "c10d":
        return _make_session(group, device, rank, ranks, exchange, None, "c10d", choice.reason)
    slot_bytes = round_slot_bytes(max(host["slot"] for host in hosts))
    # On CUDA the slots are elsewhere: shared memory then only holds the hosts' words.
    arena = extension().ShmArena(rank=rank, ranks=ranks, slot_bytes=SIZE_STEP if device == "cuda" else slot_bytes)
    _join_origin(arena, exchange)
    try:
        reason = _attach_to_peers(exchange, arena, doing)
        if reason:
            return _make_session(group, device, rank, ranks, exchange, None, "c10d", reason)
        if device != "cuda":
            return _make_session(group, device, rank, ranks, exchange, arena, "shared memory", "")
        return _bind_cuda(exchange, arena, slot_bytes, doing)
    except BaseException as error:  # a peer may have bound already: it looks for failures in the arena, not in the Store
        arena.fail(error, exchange.op, exchange.site)
        raise


def _join_origin(arena: Any, exchange: Exchange) -> None:
    """Make the errors of a C++ arena name ranks of the group that the user named."""
    arena.join_origin(exchange.origin_key, exchange.origin.group, exchange.numbers if exchange.is_part else ())


def _bind_cuda(exchange: Exchange, host: Any, slot_bytes: int, doing: str) -> Session:
    """Make the symmetric memory of the group. `host`: its shared memory, attached to all peers'."""
    from . import symm_mem

    group, rank, ranks = exchange.group, exchange.rank, exchange.ranks
    symmetric = symm_mem.SymmetricArena(host, group, rank, ranks, slot_bytes, exchange.abort)
    tokens = exchange.gather("allocated", {"slot": slot_bytes, "name": symmetric.data_address}, "init", doing)
    symmetric.rendezvous([token["name"] for token in tokens])
    _join_origin(symmetric.core, exchange)
    exchange.gather("ready", {}, "init", doing)
    return _make_session(group, exchange.device, rank, ranks, exchange, symmetric, "symmetric memory", "")


def _attach_to_peers(exchange: Exchange, arena: Any, doing: str) -> str:
    """Map the memory of all peers. Return why one of the ranks cannot, equal on all ranks, "" where all can.

    That is known only now: a process that changed its user, or that has file capabilities, is closed to its peers.
    """
    reason, unreachable = "", dict[int, int]()  # peer -> pid
    try:
        own = {"control": arena.control_address, "data": arena.data_address}
        for peer, address in enumerate(exchange.gather("arena", own, "init", doing)):
            problem = "" if peer == exchange.rank else arena.attach(peer, address["control"], address["data"])
            if problem:
                own_number, number = exchange.number, exchange.numbers[peer]
                reason = reason or f"its rank {own_number} cannot map the memory of rank {number} ({problem})"
                unreachable[peer] = int(address["control"].partition(":")[0])
        late = time.monotonic() + _LATE_S

        def check() -> None:
            arena.check(exchange.op, exchange.site)
            for peer, pid in unreachable.items():
                if time.monotonic() > late and has_ended(pid):
                    raise exchange.gone_error(peer, "attached")

        results = exchange.gather("attached", {"unreachable": reason}, "init", doing, check)
    finally:
        arena.stop_sharing()
    return next((result["unreachable"] for result in results if result["unreachable"]), "")


def _exchange_hosts(exchange: Exchange, device: str, slot_bytes: int, doing: str) -> list[dict[str, Any]]:
    """Return every rank's host, GPU, builds and requested slot size. BuildMismatchError where builds differ."""
    info = extension().build_info()
    versions = {"version": info["version"], "torch": info["torch"]}
    own = {**versions, "host": host_id(device), "slot": slot_bytes, "token": secrets.token_hex(8)}
    if device == "cuda":
        from . import symm_mem

        symm_mem.refuse_capture(f"bind group '{exchange.group}'")
        own["gpu"] = symm_mem.describe_gpu()
        own["algorithms"] = _load_algorithms()
    try:
        hosts = exchange.gather("hosts", own, "init", doing, watch_processes(exchange, "hosts"))
    except errors.PeerTimeoutError as timeout:
        digest = SiteId.parse(exchange.site).digest
        raise plan_announcements.explain_timeout(exchange, "hosts", digest, timeout) from None
    exchange.abort.token = hosts[0]["token"]
    for peer, host in enumerate(hosts):
        peer_versions = {key: host[key] for key in versions}
        if peer_versions != versions:
            raise errors.BuildMismatchError(
                f"ranks {exchange.number} and {exchange.numbers[peer]} of {exchange.label} run different builds",
                got=f"rank {exchange.numbers[peer]}: {peer_versions}",
                expected=f"rank {exchange.number}: {versions}",
                fix="install the same ub_overlap and torch on all ranks",
            )
    if len({host.get("algorithms", "") for host in hosts}) > 1:
        import torch

        matmul_algorithms.drop(torch.cuda.current_device(), exchange.group)
    return hosts


def _load_algorithms() -> str:
    """Use the stored algorithms of matmuls on this rank's GPU. Return a digest of them, which all ranks must share."""
    from ..matmul_algorithms import gpu

    device = gpu.MatmulGpu()
    return matmul_algorithms.load(device.device, device.library())


def _exchange_topology(exchange: Exchange, device: str, hosts: Sequence[dict[str, Any]], doing: str) -> topology.Topology:
    """Return the group's topology. Links between GPUs are looked up only where the hosts do not rule out sharing."""
    by_host = topology.Topology(hosts=tuple(host["host"] for host in hosts))
    if device != "cuda" or topology.choose_transport(by_host).transport == "c10d":
        return by_host
    from . import symm_mem

    uuids = [host["gpu"]["uuid"] for host in hosts]
    accepts = {"any": settings.current().links == "any", "shared_gpus": settings.current().shared_gpus}
    links = {**symm_mem.find_links(uuids, exchange.rank), **accepts}
    return topology.build_topology(hosts, exchange.gather("links", links, "init", doing))


def _describe_pairs(pairs: Sequence[tuple[int, int]]) -> str:
    few = ", ".join(f"{i} and {j}" for i, j in pairs[:4])
    return few if len(pairs) <= 4 else f"{few} and {len(pairs) - 4} more pairs"
