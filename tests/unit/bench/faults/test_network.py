"""The switch between network namespaces: what passes, and when."""

import ctypes
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tandem.bench.faults.network import Network, Rule, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

_CLONE_NEWNET = 0x40000000

# Echoes datagrams to their sender.
ECHO = """
import socket, sys
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind((sys.argv[1], 5000))
print("ready", flush=True)
while True:
    data, peer = server.recvfrom(100)
    server.sendto(data, peer)
"""


@pytest.fixture(scope="module")
def own_namespace() -> Iterator[None]:
    """The thread of these tests, and what it starts, in a network namespace of its own.

    A NIXL agent that another test starts meanwhile would tell its peers the address of the
    switch's device, and they could not be connected once it is gone.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    assert libc.unshare(_CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    yield
    assert libc.setns(before, _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    os.close(before)


@pytest.fixture(scope="module")
def network(own_namespace: None) -> Iterator[Network]:
    network = Network(["p"])
    place = network.place("p")
    command = [*place.prefix, sys.executable, "-c", ECHO, place.host]
    echo = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert echo.stdout is not None
    assert echo.stdout.readline() == b"ready\n"
    yield network
    echo.kill()
    echo.communicate()
    network.close()


def ask(network: Network, count: int, timeout_s: float) -> tuple[int, float]:
    """(echoes that came back, seconds till the last of them)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(timeout_s)
        start = last = time.monotonic()
        for number in range(count):
            client.sendto(str(number).encode(), (network.place("p").host, 5000))
        num_back = 0
        try:
            while num_back < count:
                client.recv(100)
                num_back += 1
                last = time.monotonic()
        except TimeoutError:
            pass
        return num_back, last - start


def test_packets_pass_late_or_not_at_all_as_the_rule_says(network: Network) -> None:
    network.clear()
    assert ask(network, 1, 20.0)[0] == 1
    network.set_rule("", "p", Rule(delay_s=0.2))
    num_back, seconds = ask(network, 1, 20.0)
    assert num_back == 1
    assert seconds >= 0.4
    network.set_rule("p", "", Rule(loss=0.5))
    assert 0 < ask(network, 200, 1.0)[0] < 150
    network.set_rule("", "p", Rule(is_cut=True))
    dropped = network.num_dropped
    assert ask(network, 3, 0.5)[0] == 0
    assert network.num_dropped >= dropped + 3
    network.clear()
    assert ask(network, 1, 20.0)[0] == 1


def test_unknown_namespaces_have_no_place(network: Network) -> None:
    with pytest.raises(KeyError):
        network.place("q")
