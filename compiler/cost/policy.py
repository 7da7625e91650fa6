"""The policy of overlap="auto": which sites the cost model decides, with which profile and threshold.

One `Policy` is built per pass, for sites, saved activations and float8 casts. No other file loads a profile for a decision.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import Node

from ..match.collectives import Collective, read_collective
from ..match.site import Site
from ..options import Options
from .profile import Profile
from .profile_lookup import load
from .site_sizes import NO_HINTS, Hints
from .traffic import bytes_sent, bytes_sent_in


@dataclass(slots=True)
class Policy:
    """The options that control cost decisions. `threshold`: bytes that a rank must send; 0 where overlap is forced."""

    is_forced: bool
    """overlap="force": every legal site is overlapped, whatever its predicted saving."""
    threshold: int
    is_autotuned: bool
    profile_name: str | None
    """The profile that the user chose; None: this machine's."""
    wants_float8_wire: bool
    """Products of float8 operands are to be scattered as float8."""
    pack: str = "auto"
    independent_matmuls: str = "auto"
    may_split: bool = True
    split_bytes: int = 0
    may_zero_copy: bool = False
    may_fuse: bool = False
    may_coalesce: bool = True
    hierarchical: str = "auto"
    """The options of these names. `may_split`: `split` is "auto", and `overlap` not "off". `may_zero_copy`, `may_fuse`,
    `may_coalesce`: `zero_copy`, `few_tokens` and `coalesce` are "auto"."""
    _profiles: dict[tuple[int | None, str], Profile] = field(default_factory=dict)

    @classmethod
    def of(cls, options: Options) -> Policy:
        forced = options.overlap == "force"
        threshold = 0 if forced else options.min_bytes
        return cls(
            forced, threshold, options.autotune, options.profile, options.fp8.reduce_scatter, options.pack,
            options.independent_matmuls, options.split == "auto" and options.overlap != "off",
            options.split_bytes, options.zero_copy == "auto", options.few_tokens == "auto", options.coalesce == "auto",
            options.hierarchical,
        )  # fmt: skip

    def is_modeled(self, device: str) -> bool:
        """Return whether `device` has a meaningful cost model. The CPU executor is a reference without a performance goal."""
        return self.profile_name is not None or device == "cuda"

    def is_weighed(self, device: str) -> bool:
        """Return whether predicted times decide on `device`."""
        return not self.is_forced and self.is_modeled(device)

    def profile(self, ranks: int | None, device: str) -> Profile:
        """Return the profile for predictions in groups of `ranks`."""
        key = (ranks, device)
        if key not in self._profiles:
            self._profiles[key] = load(self.profile_name, ranks, device)
        return self._profiles[key]

    def is_below_threshold(self, sent: int | None) -> bool:
        """Return whether `sent` bytes are too few to overlap. False if `sent` has no value."""
        return sent is not None and sent < self.threshold

    def bytes_sent(self, site: Site, wire_dtype: str = "", hints: Hints = NO_HINTS) -> int | None:
        """Return the bytes one rank sends at `site`, None for a size without a value in `hints`."""
        return bytes_sent(site, wire_dtype, hints)

    def bytes_sent_in(self, collective: Collective | Node, itemsize: int, hints: Hints) -> int | None:
        """Return the bytes one rank sends in `collective`, by bytes of an element; None for a size without a value."""
        return bytes_sent_in(read_collective(collective) if isinstance(collective, Node) else collective, itemsize, hints)
