"""Training data: the bytes of text files of Python and of this repository. Nothing is downloaded."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
STDLIB = Path(sysconfig.get_paths()["stdlib"])

MAX_BYTES = 2_000_000


def text_files() -> list[Path]:
    """Return the files in reading order: Python's license, help topics, stdlib modules, this repository's pages."""
    candidates = [STDLIB / name for name in ("LICENSE.txt", "pydoc_data/topics.py", "argparse.py", "statistics.py")]
    candidates += [ROOT / "LICENSE", ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in candidates if path.is_file()]


def load_corpus() -> Tensor:
    """Return all text as a 1D int64 tensor of byte values, at most MAX_BYTES long.

    Raises:
        FileNotFoundError: none of the files exists.
    """
    files = text_files()
    if not files:
        raise FileNotFoundError(f"no text to train on: none of Python's texts in {STDLIB}, none of this repository's in {ROOT}")
    text = b"".join(path.read_bytes() for path in files)[:MAX_BYTES]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


class TextBatches:
    """Random windows of the corpus from a seed: the same on every rank and in every run over the same text."""

    def __init__(self, corpus: Tensor, *, batch: int, seq: int, seed: int) -> None:
        if len(corpus) <= seq + 1:
            raise ValueError(f"seq={seq} is too long for a corpus of {len(corpus)} bytes")
        self.corpus, self.batch, self.seq = corpus, batch, seq
        self.generator = torch.Generator().manual_seed(seed)

    def next(self) -> tuple[Tensor, Tensor]:
        """Return tokens [batch, seq] and targets [batch, seq], shifted by one; int64."""
        starts = torch.randint(len(self.corpus) - self.seq - 1, (self.batch,), generator=self.generator)
        windows = torch.stack([self.corpus[s : s + self.seq + 1] for s in starts.tolist()])
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
