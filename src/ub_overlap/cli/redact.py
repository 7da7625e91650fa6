"""Remove secrets from text that leaves the machine: values of secret names, tokens, passwords in URLs, the home folder.

What is assigned to an environment variable stays only for the variables of SHOWN, or if it cannot be a secret: a number, True,
False, None or nothing. So does what is assigned to any other name that may be a secret's. A long word of random letters and
digits stays only in a path or as a part of a longer name.
"""

from __future__ import annotations

import re
from pathlib import Path

REDACTED = "<redacted>"
SHOWN = (
    "UB_OVERLAP_", "TORCH", "PYTORCH_", "NCCL_", "NVSHMEM_", "CUDA_", "TRITON_", "OMP_", "MKL_", "MASTER_ADDR", "GLOO_", "RANK",
    "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "PYTHON", "PATH", "LD_", "CXX", "CC", "PWD", "HOME", "TMPDIR", "COLUMNS", "LANG",
)  # fmt: skip
"""Beginnings of the environment variables whose values may be shown, if their names are no secret's."""
_SECRET_NAME = (
    r"[\w.-]*?(?:token|secret|passw(?:or)?d|passphrase|pwd|pgpass|(?<!by)pass|credentials?|auth|authorization|jwt|cookie|session[_-]?id|sig|signature"
    r"|(?:api|access|private|secret|account|shared|ssh|encryption|license|storage)[\w-]*?key)"
)
_START = r"(?<![\w.-])"  # of a name; keeps the search linear in the length of a word
_QUOTE = r"\\*[\"']"  # of JSON in JSON, too
_HARMLESS = r"(?:\d+(?:\.\d*)?|True|False|None|true|false|null)(?:[\s\"',;}\])\\&]|$)"
_VALUE = rf"(?!{_HARMLESS})(?:(?:Token|Bearer|Basic|ApiKey)\s+)?[^\s\"',;&\\]+"
"""A word that may be a secret. Logs have lines like "pad_token: 0"."""
_VARIABLE = rf"(?!(?:{'|'.join(SHOWN)}))[A-Z][A-Z0-9_]{{2,}}"
_QUOTED = rf"(?P<quote>{_QUOTE})(?!{_HARMLESS})(?!(?P=quote)).*?(?P=quote)"
_RANDOM_WORD = r"(?<![\w/+=.-])(?=[A-Za-z+=]*\d)(?=[a-z0-9+=]*[A-Z])(?=[A-Z0-9+=]*[a-z])[A-Za-z0-9+=]{32,}(?![\w/.-])"
_HEX_WORD = r"(?<![\w/+=.-])(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{32,}(?![\w/.-])"
_IS_SECRET = re.compile(rf"{_SECRET_NAME}(?:_.*)?", re.IGNORECASE)
_PATTERNS = (
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/\"]+@", re.IGNORECASE), rf"\1{REDACTED}@"),
    (re.compile(r"\b((?i:Bearer)|Basic)\s+[\w.~+/=-]{8,}"), rf"\1 {REDACTED}"),
    (re.compile(r"\b((?:set-)?cookie\s*:\s*)[^\n\"']+", re.IGNORECASE), rf"\1{REDACTED}"),
    (re.compile(r"(https://hooks\.[\w.-]+/)[^\s\"']+"), rf"\1{REDACTED}"),
    (
        re.compile(rf"({_START}{_SECRET_NAME}(?:{_QUOTE})?\s*[=:]\s*){_QUOTED}", re.IGNORECASE),
        rf"\1\g<quote>{REDACTED}\g<quote>",
    ),
    (
        re.compile(rf"({_START}{_SECRET_NAME}(?:{_QUOTE})?\s*[=:]\s*)(?!\\*[\"'])(?!Bearer <|Basic <){_VALUE}", re.IGNORECASE),
        rf"\1{REDACTED}",
    ),
    (re.compile(rf"({_START}{_VARIABLE}=){_QUOTED}"), rf"\1\g<quote>{REDACTED}\g<quote>"),
    (re.compile(rf"({_START}{_VARIABLE}=)(?!\\*[\"'<]){_VALUE}"), rf"\1{REDACTED}"),
    (re.compile(rf"({_START}--(?:{_SECRET_NAME}|key)[\"']?,?\s+[\"']?)(?!-){_VALUE}", re.IGNORECASE), rf"\1{REDACTED}"),
    (re.compile(r"\beyJ[\w-]{5,}\.[\w-]{5,}(?:\.[\w-]*)?"), REDACTED),
    (re.compile(r"\b(hf_|ghp_|gho_|ghs_|github_pat_|glpat-|sk-|xox[abp]-|AKIA|ASIA)[\w-]{8,}"), REDACTED),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), REDACTED),
    (re.compile(_RANDOM_WORD), REDACTED),
    (re.compile(_HEX_WORD), REDACTED),
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
