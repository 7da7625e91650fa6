"""The `Plan`: one `Decision` for every collective of a graph, in graph order.

It is frozen, hashable by its digest and JSON. The rewrite obeys it, the report shows it, and all ranks of a group compare the
shared part of its digest before the first call.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from ub_overlap.runtime.site_id import shared_digest
from ub_overlap.runtime.stored_file import parse_json

from .decision import CastDecision, Decision
from .reasons import Reason, collective_of
from .records import PLAN_VERSION, PlanRecord, as_record
from .strategy import Mode


@dataclass(frozen=True)
class Plan:
    """The decisions of one graph.

    `digest` identifies it in ops, stores and reports: "<shared>-<own>". The shared part is equal on all ranks of a group. The
    own part covers everything else, so two plans of a process never have the same digest.
    """

    phase: str
    decisions: tuple[Decision, ...]
    profile: str = ""
    """The device profiles behind its choices, by name and digest; "" where no choice needed one."""
    casts: tuple[CastDecision, ...] = ()
    """The matmuls of linears that the float8 pass considered, in graph order; empty without it."""
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        own = [[d.to_dict() for d in self.decisions], [c.to_dict() for c in self.casts]]
        object.__setattr__(self, "digest", f"{_hash(self.shared)[:16]}-{_hash(own)[:8]}")

    @property
    def shared_digest(self) -> str:
        """The part of the digest that ranks compare."""
        return shared_digest(self.digest)

    @property
    def shared(self) -> dict[str, Any]:
        """What all ranks of a group must agree on, and nothing else. The shared part of the digest is computed from it.

        Where digests differ, an error names the first part that differs (runtime/session/plan_mismatch.py). So causes come
        before effects. It holds what decides how ranks communicate and in which order, and the module, so that stored plans of
        equal graphs do not mix. Node names, source lines and sentences only explain. Of the shapes it holds those that ranks
        share: not the matmuls' own (the last columns of a weight may be on fewer ranks), and none of sites left alone. All
        ranks must quantize alike, because scales and gathered bytes are common to them. What a rank adds to its product before
        a reduction is its own business; the constant that a product is multiplied by is not, as it follows the reduction.
        """
        return {
            "profile": self.profile,
            "phase": self.phase,
            "casts": [{"module": c.module, "role": c.role, "recipe": c.recipe} for c in self.casts],
            "sites": [
                {
                    "id": d.id, "kind": d.kind.value, "strategy": str(d.strategy), "group": d.group, "ranks": d.ranks,
                    "dtype": d.dtype, "module": d.module, "takes": list(d.takes), "shapes": d.shared_shapes,
                    "wire_dtype": d.wire_dtype, "scale": d.scale, "packs": list(d.packs),
                    "keeps": d.kept.keeps if d.kept else None,
                    **({"window": d.window.shared} if d.window else {}),
                    **({"sends": d.sent_dtype} if d.sent_dtype else {}),
                    **({"reordered": d.reordered} if d.reordered else {}),
                }
                for d in self.decisions
            ],
        }  # fmt: skip

    @property
    def graph(self) -> str:
        """An identifier of the graph, whatever was decided: equal for plans that differ in strategies or in float8.

        So it leaves out what float8 adds and changes: collectives of scales, site numbers and dtypes.
        """
        own = [d for d in self.decisions if d.reason is not Reason.SCALES and d.strategy.mode is not Mode.MERGED]
        rows = [[collective_of(d.kind.value), d.group, d.ranks, d.module] for d in own]
        return _hash([self.phase, rows])[:16]

    def to_json(self) -> str:
        return json.dumps(
            {
                "version": PLAN_VERSION,
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
    def from_json(cls, text: str, where: str = "a plan") -> Plan:
        """Read the result of `to_json`. StoredFileError names `where` and the field."""
        d = as_record(parse_json(text, where), PlanRecord, where, "a plan")
        return cls(
            d["phase"],
            tuple(Decision.from_dict(s) for s in d["sites"]),
            d.get("profile", ""),
            tuple(CastDecision.from_dict(c) for c in d.get("casts", [])),
        )


def _hash(content: Any) -> str:
    """Return a hash of plain data."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
