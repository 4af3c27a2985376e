"""A child of test_child.py: says what it was told, then waits; may have a child of its own."""

import os
import sys
import time

import msgspec

from tandem.engine.child import make_folder, read_settings, spawn


class EchoSettings(msgspec.Struct, frozen=True):
    """`depth`: how many generations follow; `path`: where each appends its process id and the
    folder that it made."""

    path: str
    depth: int = 0
    must_ignore_life_line: bool = False
    exit_status: int | None = None  # leave by itself at once


def main() -> None:
    settings = read_settings(EchoSettings)
    if settings.must_ignore_life_line:
        os._exit = lambda status: time.sleep(600)  # type: ignore[assignment]
    children = []
    if settings.depth:
        deeper = EchoSettings(settings.path, settings.depth - 1)
        children.append(spawn("tests.unit.engine.echo_process", deeper))
    with open(settings.path, "a") as file:
        file.write(f"{os.getpid()} {make_folder('tandem-echo-')}\n")
    if settings.exit_status is not None:
        sys.exit(settings.exit_status)
    time.sleep(600)


if __name__ == "__main__":
    main()
