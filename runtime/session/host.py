"""Identity of a rank's host: what ranks must share to use each other's memory.

Peers open shared memory as /proc/<pid>/fd/<number>, see by the pid whether a rank is gone, and compare its heartbeats with
their own monotonic clock. So ranks share memory only within one boot of one machine, one pid namespace and one time namespace.
IPC and network namespaces do not matter, nor does /dev/shm. On CUDA, torch passes descriptors through sockets in the temporary
directory, which must then be one too. Whether a peer may open the memory shows when it does (bind.py).
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket

from ..errors import ArenaError
from ..extension import extension
from .host_layout import own_host


def host_id(device: str) -> str:
    """Return "<host name>:<boot>;<label>=<value>;...", equal for two processes that may share memory for `device`.

    The labels name in the plural what differs (topology.py).
    """
    pretended = extension().testing.host_id()
    if pretended:
        return pretended
    boot, declared = _read("/proc/sys/kernel/random/boot_id"), own_host()
    parts = {"pid namespaces": _link("/proc/self/ns/pid"), "time namespaces": _link("/proc/self/ns/time")}
    if device == "cuda":
        parts["temporary directories (TMPDIR)"] = _identify(_socket_directory())
    name = f"{declared}.{socket.gethostname()}" if declared else socket.gethostname()
    return ";".join([f"{name}:{boot}", *(f"{label}={value}" for label, value in parts.items())])


def has_ended(pid: int) -> bool:
    """Return whether a process of this pid namespace has ended, or is a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return True
    except OSError:  # it cannot be looked up, as in a process that may open no further file
        return False


def _read(path: str) -> str:
    """Return the text of a file, "" where this kernel does not have it or hides it.

    ArenaError where no further file can be opened: a rank that cannot see its host would be one of another host to its peers,
    and the group would not be served.
    """
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            return ""
        fix = "raise the limit of open files (ulimit -n, or fs.file-max of the host)"
        raise ArenaError("cannot look up which host this is", where=path, got=str(error), fix=fix) from error


def _link(path: str) -> str:
    with contextlib.suppress(OSError):  # a kernel without this kind of namespace
        return os.readlink(path)
    return ""


def _socket_directory() -> str:
    """Return the directory in which torch's symmetric memory makes its sockets."""
    return next((os.environ[name] for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR") if name in os.environ), "/tmp")


def _identify(directory: str) -> str:
    with contextlib.suppress(OSError):
        status = os.stat(directory)
        return f"{status.st_dev}.{status.st_ino}"
    return directory
