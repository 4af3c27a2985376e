"""Network namespaces joined by a switch of ours that delays, drops and cuts.

Each namespace has one TUN device; whole IP packets go through this process, which forwards them
by destination address. So loss and delay are those of a network, for every protocol, on kernels
without `netem` too. Needs root, `ip` and /dev/net/tun.
"""

import fcntl
import heapq
import ipaddress
import os
import random
import selectors
import shutil
import struct
import subprocess
import threading
import time
from dataclasses import dataclass

from tandem.bench.faults.cluster import HERE, Place
from tandem.errors import EngineDeadError

_TUNSETIFF = 0x400454CA
_IFF_TUN = 0x0001
_IFF_NO_PI = 0x1000
_MTU = 9000
# Beyond this many packets on their way the link drops, as a full queue does.
_MAX_QUEUED = 20_000


def why_not() -> str | None:
    """Why this machine cannot have such namespaces, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the command `ip` (iproute2) is missing"
    if not os.path.exists("/dev/net/tun"):
        return "/dev/net/tun is missing"
    return None


@dataclass(frozen=True)
class Rule:
    """How a link treats packets. `loss` is a probability; `is_cut`: nothing passes."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    is_cut: bool = False


CLEAR = Rule()


class Network:
    """Namespaces by name, and the rule of each pair of them; "" is this process's own namespace.

    Rules may change at any time. close() removes every namespace.
    Raises: EngineDeadError if the system refuses.
    """

    def __init__(self, names: list[str], seed: int = 0) -> None:
        self._names = ["", *names]
        self._tag = f"{os.getpid() % 100000}"
        self._draw = random.Random(seed)
        self._fds: list[int] = []
        self._rules: dict[frozenset[int], Rule] = {}
        self._queue: list[tuple[float, int, int, bytes]] = []
        self._count = 0
        self.num_dropped = 0
        self.num_forwarded = 0
        self._is_closing = False
        # Two of these on one machine must not have the same addresses.
        self._subnet = ipaddress.ip_network(f"10.213.{os.getpid() % 256}.0/24")
        self._addresses = {name: str(self._subnet[10 + at]) for at, name in enumerate(self._names)}
        self._by_address = {
            int(ipaddress.ip_address(address)): at
            for at, address in enumerate(self._addresses.values())
        }
        self._thread = threading.Thread(target=self._run, name="switch", daemon=True)
        try:
            for name in self._names:
                self._fds.append(self._add_device(name))
        except BaseException:
            self._remove()
            raise
        self._thread.start()

    def place(self, name: str) -> Place:
        """Where a server of that namespace runs."""
        address = self._addresses[name]
        if not name:
            return Place(address, HERE.prefix)
        return Place(address, ("ip", "netns", "exec", self._namespace(name)))

    def set_rule(self, one: str, other: str, rule: Rule) -> None:
        """Of the link between two namespaces, both ways."""
        self._rules[frozenset((self._names.index(one), self._names.index(other)))] = rule

    def clear(self) -> None:
        self._rules = {}

    def _namespace(self, name: str) -> str:
        return f"tandem-{self._tag}-{name}"

    def device(self, name: str) -> str:
        """Its network device."""
        return f"td{self._tag}{name}"[:15]

    def _add_device(self, name: str) -> int:
        device = self.device(name)
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        request = struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI)
        fcntl.ioctl(fd, _TUNSETIFF, request)
        inside: list[str] = []
        if name:
            namespace = self._namespace(name)
            _ip("netns", "add", namespace)
            _ip("link", "set", device, "netns", namespace)
            inside = ["-n", namespace]
            _ip(*inside, "link", "set", "lo", "up")
        _ip(*inside, "addr", "add", f"{self._addresses[name]}/24", "dev", device)
        _ip(*inside, "link", "set", device, "mtu", str(_MTU), "up")
        return fd

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for at, fd in enumerate(self._fds):
                selector.register(fd, selectors.EVENT_READ, at)
            while not self._is_closing:
                wait_s = 0.1
                if self._queue:
                    wait_s = max(0.0, min(wait_s, self._queue[0][0] - time.monotonic()))
                for key, _ in selector.select(wait_s):
                    self._take(key.fd, key.data)
                self._send_due()

    def _take(self, fd: int, source: int) -> None:
        """Packets that a namespace sends: forward, keep for later, or drop."""
        for _ in range(64):
            try:
                packet = os.read(fd, 65536)
            except BlockingIOError:
                return
            if packet[0] >> 4 != 4:
                continue  # IPv6 neighbour discovery
            target = self._by_address.get(int.from_bytes(packet[16:20], "big"))
            if target is None:
                continue
            rule = self._rules.get(frozenset((source, target)), CLEAR)
            is_lost = rule.is_cut or (rule.loss > 0 and self._draw.random() < rule.loss)
            if is_lost or len(self._queue) > _MAX_QUEUED:
                self.num_dropped += 1
                continue
            delay_s = rule.delay_s + rule.jitter_s * self._draw.random()
            if delay_s:
                self._count += 1
                heapq.heappush(
                    self._queue, (time.monotonic() + delay_s, self._count, target, packet)
                )
            else:
                self._write(target, packet)

    def _send_due(self) -> None:
        now = time.monotonic()
        while self._queue and self._queue[0][0] <= now:
            _, _, target, packet = heapq.heappop(self._queue)
            self._write(target, packet)

    def _write(self, target: int, packet: bytes) -> None:
        try:
            os.write(self._fds[target], packet)
            self.num_forwarded += 1
        except OSError:
            self.num_dropped += 1  # the other end takes no more, like any full queue

    def close(self) -> None:
        self._is_closing = True
        if self._thread.is_alive():
            self._thread.join()
        self._remove()

    def _remove(self) -> None:
        for fd in self._fds:
            os.close(fd)  # the device goes with it
        self._fds = []
        for name in self._names[1:]:
            subprocess.run(
                ["ip", "netns", "del", self._namespace(name)], capture_output=True, check=False
            )


def _ip(*words: str) -> None:
    result = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if result.returncode:
        raise EngineDeadError(f"`ip {' '.join(words)}` failed: {result.stderr.strip()}")
