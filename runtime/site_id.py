"""The name of a site: the digest of its plan and the site's name in it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SiteId:
    """One site of one plan: "<digest>/<name>" in the `site` argument of an op, in statistics and in logs."""

    digest: str
    name: str
    """"<phase>.<number in graph order>"."""

    def __str__(self) -> str:
        return f"{self.digest}/{self.name}"

    @classmethod
    def parse(cls, text: str) -> SiteId:
        """Read "<digest>/<name>". Text without a slash is a name without a plan."""
        digest, slash, name = text.partition("/")
        return cls(digest, name) if slash else cls("", text)
