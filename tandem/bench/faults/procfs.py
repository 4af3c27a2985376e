"""Process trees and what their processes hold, from /proc. It starts and ends nothing."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Holdings:
    """What one process holds of the machine."""

    name: str  # last word of its command that names a module or command
    rss_mib: float
    num_threads: int
    num_fds: int


def parents() -> dict[int, int]:
    """Parent of every process of this host."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                found[int(entry)] = int(_stat(int(entry))[1])
    return found


def tree(pid: int) -> list[int]:
    """A process and its descendants, parents first."""
    parent_of = parents()
    found = [pid] if pid in parent_of else []
    for known in found:
        found += [child for child, parent in parent_of.items() if parent == known]
    return found


def is_running(pid: int) -> bool:
    """False for a zombie too."""
    try:
        return _stat(pid)[0] not in "ZX"
    except OSError:
        return False


def holdings(pid: int) -> Holdings | None:
    """None for a process that has ended."""
    try:
        stat = _stat(pid)
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        named = [word for word in words if word.startswith("tandem.")]
        return Holdings(
            name=named[0] if named else words[0],
            rss_mib=int(stat[21]) * _PAGE_NBYTES / 2**20,
            num_threads=int(stat[17]),
            num_fds=len(os.listdir(f"/proc/{pid}/fd")),
        )
    except OSError:
        return None


def _stat(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat from the state on; the name before it may hold blanks."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
