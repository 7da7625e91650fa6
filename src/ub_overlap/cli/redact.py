"""Remove secrets from text that leaves the machine: values of secret variables, tokens, passwords in URLs, the home folder."""

from __future__ import annotations

import re
from pathlib import Path

REDACTED = "<redacted>"
_SECRET_NAME = r"[\w.-]*(?:token|secret|passw(?:or)?d|passphrase|credentials?|(?:api|access|private|secret)[_-]?key|auth)"
_START = r"(?<![\w.-])"  # of a name; keeps the search linear in the length of a word
_VALUE = r"(?!\d+(?:\.\d*)?(?:[\s\"',;}\])]|$))[^\s\"',;]+"
"""Any value but a number, which is no secret: logs have lines like "pad_token: 0"."""
_IS_SECRET = re.compile(rf"{_SECRET_NAME}(?:_.*)?", re.IGNORECASE)
_PATTERNS = (
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/\"]+@", re.IGNORECASE), rf"\1{REDACTED}@"),
    (re.compile(rf"({_START}{_SECRET_NAME}[\"']?\s*[=:]\s*[\"']?){_VALUE}", re.IGNORECASE), rf"\1{REDACTED}"),
    (re.compile(rf"({_START}--{_SECRET_NAME}[\"']?,?\s+[\"']?)(?!-){_VALUE}", re.IGNORECASE), rf"\1{REDACTED}"),
    (re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{8,}"), rf"\1 {REDACTED}"),
    (re.compile(r"\b(hf_|ghp_|gho_|ghs_|github_pat_|glpat-|sk-|xox[abp]-|AKIA|ASIA)[\w-]{8,}"), REDACTED),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), REDACTED),
)


def redact_variable(name: str, value: str) -> str:
    """Return the value of an environment variable without secrets."""
    return REDACTED if _IS_SECRET.fullmatch(name) and value else redact_text(value)


def redact_text(text: str) -> str:
    """Return text without known forms of secrets, and with ~ for the home folder."""
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    try:
        home = str(Path.home())
    except RuntimeError:  # the user has no home folder
        return text
    return re.sub(rf"{re.escape(home)}(?=/|\b)", "~", text) if len(home) > 1 else text
