"""Work on a stream concurrent with the caller's, with a future that the caller's stream waits for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.futures import Future


class SideStreams:
    """`count` streams per device. On the CPU there are none, and work runs at once."""

    def __init__(self, count: int = 1) -> None:
        self._count = count
        self._streams: dict[torch.device, list[torch.cuda.Stream]] = {}

    @contextlib.contextmanager
    def asynchronous(self, result: Tensor, index: int = 0) -> Iterator[Future[Tensor]]:
        """Run the body on side stream `index` modulo `count`, behind the current stream. The future then holds `result`.

        Its `wait()` makes the current stream wait. Tensors that the body reads must live until then.
        """
        if not result.is_cuda:
            ready: Future[Tensor] = Future()
            yield ready
            ready.set_result(result)
            return
        future: Future[Tensor] = Future(devices=[result.device])
        side = self._stream(result.device, index % self._count)
        side.wait_stream(torch.cuda.current_stream(result.device))
        with torch.cuda.stream(side):
            yield future
            future.set_result(result)

    def _stream(self, device: torch.device, index: int) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = [torch.cuda.Stream(device, priority=-1) for _ in range(self._count)]
        return self._streams[device][index]
