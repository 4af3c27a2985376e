"""Signals of a command, from a process of its own."""

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio
from tandem.launch.signals import Stop, run_until_signalled
stop = Stop()
async def work():
    try:
        if {is_armed}:
            stop.arm()
        print("ready", flush=True)
        await stop.wait()
        print("asked", flush=True)
        await asyncio.sleep({seconds})
        print("ended", flush=True)
    finally:
        print("left", flush=True)
run_until_signalled(work(), stop, is_child={is_child})
"""


@pytest.mark.parametrize(
    ("settings", "num_signals", "words"),
    [
        ({"is_armed": False, "seconds": 60, "is_child": False}, 1, ["left"]),
        ({"is_armed": True, "seconds": 0, "is_child": False}, 1, ["asked", "ended", "left"]),
        ({"is_armed": True, "seconds": 60, "is_child": False}, 2, ["asked", "left"]),
        ({"is_armed": True, "seconds": 0.3, "is_child": True}, 2, ["asked", "ended", "left"]),
    ],
    ids=["not armed", "one", "two", "two of a child"],
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks_and_the_second_ends(settings, num_signals, words, number):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(**settings)], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout.readline() == "ready\n"
        said = []
        for count in range(num_signals):
            process.send_signal(number)
            if count + 1 < num_signals:
                said.append(process.stdout.readline().strip())
        said += process.stdout.read().split()
        assert process.wait(20) == 0
    assert said == words
