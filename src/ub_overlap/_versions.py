"""The version of ub_overlap, and the torch versions that it supports.

The only place for both. setup.py runs this file before anything is installed, so it imports nothing.
"""

VERSION = "0.1.0"

OLDEST_TORCH = (2, 11)
NEWEST_TORCH = (2, 15)
SUPPORTED_TORCH = f"{OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} to {NEWEST_TORCH[0]}.{NEWEST_TORCH[1]}"
REQUIREMENT = f"torch>={OLDEST_TORCH[0]}.{OLDEST_TORCH[1]},<{NEWEST_TORCH[0]}.{NEWEST_TORCH[1] + 1}"
"""The same for pip, as in pyproject.toml."""


def is_supported_torch(version: str) -> bool:
    """Return whether ub_overlap supports the torch of this version text, e.g. "2.13.0+cpu" or "2.15.0.dev20260901"."""
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    return major.isdigit() and minor.isdigit() and OLDEST_TORCH <= (int(major), int(minor)) <= NEWEST_TORCH
