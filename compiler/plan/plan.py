"""The `Plan`: one `Decision` for every collective of a graph, in graph order.

It is frozen, hashable by its digest and JSON. The rewrite obeys it, the report shows it, and all ranks of a group compare its
digest before the first call.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from .decision import CastDecision, Decision
from .reasons import Reason, collective_of
from .strategy import Mode


@dataclass(frozen=True)
class Plan:
    """The decisions of one graph. `digest` names it in ops, stores and fingerprints: equal on all ranks of a group."""

    phase: str
    decisions: tuple[Decision, ...]
    profile: str = ""
    """The device profiles that its choices rest on, by name and digest; "" where no choice needed one."""
    casts: tuple[CastDecision, ...] = ()
    """The products of linears that the float8 pass looked at, in graph order; empty without it."""
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        text = json.dumps(self.shared, sort_keys=True)
        object.__setattr__(self, "digest", hashlib.sha256(text.encode()).hexdigest()[:16])

    @property
    def shared(self) -> dict[str, Any]:
        """All that the ranks of a group must have in common, and nothing else: the digest is made of it, and where digests
        differ the first part that differs is what an error names (runtime/session/plan_mismatch.py). Causes stand before what they cause.

        What decides how ranks talk to each other and in which order, and the module so that stored plans of twins do not mix.
        Node names, source lines and sentences only explain. Of the shapes only those count that the ranks must share: not the
        matmuls' own (the last columns of a weight may lie on fewer ranks), none of what is left alone. What is quantised must
        be so on all ranks: scales and gathered bytes are theirs together."""
        return {
            "profile": self.profile,
            "phase": self.phase,
            "casts": [{"module": c.module, "role": c.role, "recipe": c.recipe} for c in self.casts],
            "sites": [
                {
                    "id": d.id, "kind": d.kind.value, "strategy": str(d.strategy), "group": d.group, "ranks": d.ranks,
                    "dtype": d.dtype, "module": d.module, "takes": list(d.takes), "shapes": d.shared_shapes,
                    "wire_dtype": d.wire_dtype,
                    "keeps": d.kept.keeps if d.kept else None,
                }
                for d in self.decisions
            ],
        }  # fmt: skip

    @property
    def graph(self) -> str:
        """Names the graph whatever is decided on it: the same for plans that differ in strategies, and in what is float8. So
        without what float8 adds and changes: collectives of scales, numbers and types."""
        own = [d for d in self.decisions if d.reason is not Reason.SCALES and d.strategy.mode is not Mode.MERGED]
        rows = [[collective_of(d.kind.value), d.group, d.ranks, d.module] for d in own]
        return hashlib.sha256(json.dumps([self.phase, rows]).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        return json.dumps(
            {
                "version": 1,
                "digest": self.digest,
                "graph": self.graph,
                "shared": self.shared,
                "phase": self.phase,
                "profile": self.profile,
                "sites": [d.to_dict() for d in self.decisions],
                "casts": [c.to_dict() for c in self.casts],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        d = json.loads(text)
        if d.get("version") != 1:
            raise ValueError(f"plan: got version {d.get('version')!r}, expected 1; made by another version of ub_overlap")
        return cls(
            d["phase"],
            tuple(Decision.from_dict(s) for s in d["sites"]),
            d.get("profile", ""),
            tuple(CastDecision.from_dict(c) for c in d.get("casts", [])),
        )
