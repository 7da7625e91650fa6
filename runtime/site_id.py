"""The name of a site: the digest of its plan and the site's name in it.

A plan's digest is "<shared>-<own>". Ranks compare the shared part, and errors name it. The own part distinguishes
the plans of one rank. csrc/core/site_id.h cuts it off in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SiteId:
    """One site of one plan: "<digest>/<name>" in the `site` argument of an op, in statistics and in logs."""

    digest: str
    """Of the plan; its shared part in errors and in what ranks exchange."""
    name: str
    """"<phase>.<number in graph order>"."""

    def __str__(self) -> str:
        return f"{self.digest}/{self.name}"

    @classmethod
    def parse(cls, text: str) -> SiteId:
        """Read "<digest>/<name>". Text without a slash is a name without a plan."""
        digest, slash, name = text.partition("/")
        return cls(digest, name) if slash else cls("", text)


def shared_digest(digest: str) -> str:
    """Return the part of a plan's digest that ranks compare: "9f2c-71ab" -> "9f2c"."""
    return digest.partition("-")[0]
