"""The stored plans of this machine. A file that is damaged or of another version never hides the others."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from ub_overlap.runtime import plan_store
from ub_overlap.runtime.errors import StoredFileError
from ub_overlap.runtime.stored_file import read_json

from .plan import Plan
from .records import PlanRecord, as_record


def load_plan(digest: str) -> Plan | None:
    """Return the stored plan of a digest, None where this machine has none.

    StoredFileError if its file is damaged, or of another version.
    """
    text = plan_store.load(digest)
    if text is None:
        return None
    where = str(plan_store.path_of(digest))
    plan = Plan.from_json(text, where)
    if plan.digest != digest:
        raise StoredFileError("the content of the plan does not have its digest", where=where, got=plan.digest, expected=digest)
    return plan


def read_plan(path: Path) -> PlanRecord:
    """Return the plan in a file of the store. StoredFileError names the file and the field."""
    return as_record(read_json(path, "a plan"), PlanRecord, str(path), "a plan")


def stored_plans(skipped: Callable[[StoredFileError], None]) -> Iterator[tuple[Path, float, PlanRecord]]:
    """Yield (file, seconds of its last change, plan) of each stored plan, newest first. `skipped`: told of each bad file."""
    rows = []
    folder = plan_store.directory()
    for path in folder.glob("*.json") if folder.is_dir() else []:
        try:
            status = path.stat()
        except OSError:  # removed since
            continue
        if stat.S_ISREG(status.st_mode):
            rows.append((status.st_mtime, path))
        else:  # to open a FIFO would block for ever
            skipped(StoredFileError("not a file", where=str(path)))
    for changed, path in sorted(rows, reverse=True):
        try:
            yield path, changed, read_plan(path)
        except StoredFileError as error:
            skipped(error)
