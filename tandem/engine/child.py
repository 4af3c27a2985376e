"""Child processes: started with their settings on stdin, which stays open as a life line.

A child that reads end-of-file there has lost its parent and leaves at once, so no engine process
outlives the command that started it, however that command ended. Settings are JSON; nothing is
pickled.
"""

import atexit
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

Settings = TypeVar("Settings", bound=msgspec.Struct)

# Of this process; they go with it even when it leaves because its parent has gone.
_folders: set[Path] = set()


def spawn(
    module: str,
    settings: msgspec.Struct,
    environment: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Run `python -m module` and hand it `settings` as its first line of stdin."""
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        env={**os.environ, **(environment or {})},
        # Ctrl-C in a terminal reaches the parent alone; it ends its children in order.
        start_new_session=True,
        pass_fds=tuple(pass_fds),
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(settings) + b"\n")
    process.stdin.flush()
    return process


def freeze_heap() -> None:
    """Once a process has started up: what is there stays, and is looked through no more.

    Else the garbage collector goes through the modules and tables of a start-up again and again, a
    tenth of a second each time, between two steps.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # libraries complain of what an interpreter does not free


def read_settings(kind: type[Settings]) -> Settings:
    """The settings that `spawn` wrote; starts the watch over the life line."""
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=kind)
    life_line = sys.stdin.fileno()

    def leave_with_parent() -> None:
        # Not through sys.stdin: a thread that reads there holds its lock, and an interpreter that
        # ends meanwhile aborts the process.
        while os.read(life_line, 1024):
            continue
        for folder in list(_folders):
            remove_folder(folder)
        os._exit(0)

    threading.Thread(target=leave_with_parent, name="life-line", daemon=True).start()
    return settings


def ignore_signals() -> None:
    """Leave the end to the parent, which lets requests finish first: a service manager sends its
    signal to all processes at once."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def make_folder(prefix: str) -> Path:
    """A temporary folder for sockets; remove_folder() or losing the parent removes it."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    _folders.add(folder)
    return folder


def remove_folder(folder: Path) -> None:
    """Safe to call twice."""
    shutil.rmtree(folder, ignore_errors=True)
    _folders.discard(folder)


def end(process: subprocess.Popen[bytes], grace_s: float = 5.0) -> None:
    """Close the life line, wait, and kill what does not leave."""
    if process.stdin is not None and not process.stdin.closed:
        process.stdin.close()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
