"""A c10d Store wrapper that renumbers the exchange counter in torch's rendezvous keys from 0.

torch's rendezvous for symmetric memory uses the keys "<prefix>/<n>" and "<prefix>/<n>/<rank>". n counts the exchanges of the
process over all groups. Ranks with different counts use different keys and never find each other. Here n is relative to the
first n that is requested.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_KEY = re.compile(r"(?P<before>.*?/)(?P<n>\d+)(?P<after>/.*)?", re.DOTALL)


class Recounted(dist.Store):
    """`store` under `prefix`. Every rendezvous needs a new one, with the same prefix on every rank.

    C++ keeps only its C++ half alive, so the caller must keep a reference.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        super().__init__()
        self._store: Any = dist.PrefixStore(prefix, store)
        self._first = -1

    def _key(self, key: str) -> str:
        found = _KEY.fullmatch(key)
        if found is None:
            return key
        n = int(found["n"])
        if self._first < 0:
            self._first = n
        return f"{found['before']}{n - self._first}{found['after'] or ''}"

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._key(key), value)

    def get(self, key: str) -> Any:
        return self._store.get(self._key(key))

    def add(self, key: str, value: int) -> int:
        return self._store.add(self._key(key), value)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check([self._key(key) for key in keys])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        mine = [self._key(key) for key in keys]
        self._store.wait(mine) if timeout is None else self._store.wait(mine, timeout)

    def multi_get(self, keys: Sequence[str]) -> Any:
        return self._store.multi_get([self._key(key) for key in keys])

    def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> Any:
        return self._store.compare_set(self._key(key), expected_value, desired_value)

    def deleteKey(self, key: str) -> bool:
        return self._store.delete_key(self._key(key))

    def has_extended_api(self) -> bool:
        return True
