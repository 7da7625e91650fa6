"""The chosen algorithms of this process: loaded from disk when a group is bound, extended by searches."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping

from ..extension import extension
from . import store
from .store import ChosenAlgorithm, Library

log = logging.getLogger(__name__)


_digests: dict[int, str] = {}
"""Index of a device -> digest of what its file had. A process reads the file once."""


def load(device: int, library: Library) -> str:
    """Use the stored algorithms on a device. Return a digest of them, "" for none: ranks of a group compare theirs."""
    if device not in _digests:
        chosen = store.load(library)
        _digests[device] = _digest_of(chosen)
        if chosen:
            extension().add_matmul_algorithms(device, {key: row.algorithm for key, row in chosen.items()})
            log.info("cuda:%d: %d matmuls have a stored algorithm (%s)", device, len(chosen), store.path_of(library))
    return _digests[device]


def drop(device: int, group: str) -> None:
    """Use the library's first proposals, because the ranks of a group loaded different algorithms."""
    if _digests.get(device):
        log.warning("the ranks of group '%s' read different algorithms of matmuls, and use none of them in this process", group)
    _digests[device] = ""
    extension().clear_matmul_algorithms()


def known(device: int) -> set[str]:
    """Return the keys of matmuls that have a chosen algorithm."""
    return set(extension().matmul_algorithms(device))


def adopt(device: int, library: Library, chosen: Mapping[str, ChosenAlgorithm], *, write: bool) -> None:
    """Use new choices from now on, and store them if `write`."""
    if not chosen:
        return
    extension().add_matmul_algorithms(device, {key: row.algorithm for key, row in chosen.items()})
    if write:
        store.add(library, chosen)


def forget() -> None:
    """Forget what was loaded and chosen, as in a new process."""
    _digests.clear()
    extension().clear_matmul_algorithms()


def _digest_of(chosen: Mapping[str, ChosenAlgorithm]) -> str:
    text = "".join(f"{key}={row.algorithm.hex()}\n" for key, row in sorted(chosen.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16] if chosen else ""
