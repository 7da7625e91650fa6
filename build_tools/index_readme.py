"""Rewrite README.md for a package index, where relative links and pictures lead nowhere."""

from __future__ import annotations

import re

_PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*)\]\(([^)\s]+)\)")
_ABSOLUTE = re.compile(r"[a-z][a-z0-9+.-]*:|#")


def rewrite(text: str, repository: str, revision: str) -> str:
    """Return a README without relative targets.

    With the address of a public repository, targets become its pages and files at `revision`. Without one ("") pictures are
    removed, and links keep their text alone."""

    def target(path: str, kind: str) -> str:
        return path if _ABSOLUTE.match(path) else f"{repository.rstrip('/')}/{kind}/{revision}/{path}"

    def picture(match: re.Match[str]) -> str:
        label, path = match.groups()
        return f"![{label}]({target(path, 'raw')})" if repository or _ABSOLUTE.match(path) else ""

    def link(match: re.Match[str]) -> str:
        label, path = match.groups()
        return f"[{label}]({target(path, 'blob')})" if repository or _ABSOLUTE.match(path) else label

    # Links first: the label of one may be a picture, which then stands alone.
    return re.sub(r"\n{3,}", "\n\n", _PICTURE.sub(picture, _LINK.sub(link, text)))
