import os
import subprocess
import sys
import time

from tandem.bench.faults import procfs

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print(child.pid, flush=True)
input()
"""


def test_a_tree_has_descendants_and_what_they_hold() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert parent.stdout is not None
    with parent:
        child = int(parent.stdout.readline())
        assert procfs.tree(parent.pid) == [parent.pid, child]
        assert {parent.pid, child} < set(procfs.tree(os.getpid()))
        held = procfs.holdings(child)
        assert held is not None
        assert held.rss_mib > 1
        assert (held.num_threads, held.num_fds >= 3) == (1, True)
        parent.kill()
        # A zombie is not running, though it is still there.
        while procfs.is_running(parent.pid):
            time.sleep(0.001)
    assert procfs.holdings(parent.pid) is None
    assert procfs.tree(parent.pid) == []
