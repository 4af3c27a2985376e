"""Children get their settings, and never outlive their parent, however it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from tandem.engine.child import end, make_folder, remove_folder, spawn
from tests.unit.engine.echo_process import EchoSettings

MODULE = "tests.unit.engine.echo_process"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Children that are killed leave their folders behind: here."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def process_ids(path: Path, count: int) -> list[int]:
    """Of `count` generations, once they have come up."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) == count:
            return [int(line.split()[0]) for line in lines]
        time.sleep(0.01)
    raise AssertionError(f"{path} names fewer than {count} processes")


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until_gone(pids: list[int], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, f"{pids} still run"
        time.sleep(0.01)


def close(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def test_what_a_start_up_leaves_is_not_looked_through_again() -> None:
    """In a process of its own: the tests' heap stays as it is."""
    code = (
        "import gc; from tandem.engine.child import freeze_heap\n"
        "kept = [[] for _ in range(50_000)]; freeze_heap()\n"
        "cycle = []; cycle.append(cycle); del cycle\n"
        "assert gc.get_freeze_count() > 50_000 and len(gc.get_objects()) < 1000\n"
        "assert gc.collect() == 1 and len(kept) == 50_000"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_end_closes_the_life_line_and_the_child_leaves_by_itself(tmp_path: Path) -> None:
    process = spawn(MODULE, EchoSettings(str(tmp_path / "pids")))
    assert process_ids(tmp_path / "pids", 1) == [process.pid]
    start = time.monotonic()
    end(process, grace_s=20.0)
    assert time.monotonic() - start < 5
    assert process.returncode == 0
    end(process)


def test_a_child_that_leaves_by_itself_ends_with_its_own_status(tmp_path: Path) -> None:
    """Its life line is open and watched; the interpreter must get past that."""
    process = spawn(MODULE, EchoSettings(str(tmp_path / "pids"), exit_status=78))
    try:
        assert process.wait(20) == 78
    finally:
        close(process)


def test_end_kills_what_does_not_leave(tmp_path: Path) -> None:
    process = spawn(MODULE, EchoSettings(str(tmp_path / "pids"), must_ignore_life_line=True))
    process_ids(tmp_path / "pids", 1)
    end(process, grace_s=0.3)
    assert process.returncode == -signal.SIGKILL


def test_children_and_their_children_go_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    process = spawn(MODULE, EchoSettings(str(tmp_path / "pids"), depth=2))
    pids = process_ids(tmp_path / "pids", 3)
    assert all(map(is_running, pids))
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_until_gone(pids)
    close(process)


def test_the_folders_of_a_child_go_with_it(tmp_path: Path) -> None:
    process = spawn(MODULE, EchoSettings(str(tmp_path / "pids")))
    process_ids(tmp_path / "pids", 1)
    folder = Path((tmp_path / "pids").read_text().split()[1])
    (folder / "socket").touch()
    end(process)
    assert not folder.exists()


def test_a_folder_can_be_removed_early() -> None:
    folder = make_folder("tandem-test-")
    (folder / "file").touch()
    remove_folder(folder)
    assert not folder.exists()
    remove_folder(folder)


def test_a_child_is_in_a_session_of_its_own(tmp_path: Path) -> None:
    """Ctrl-C in a terminal goes to the parent alone."""
    process = spawn(MODULE, EchoSettings(str(tmp_path / "pids")))
    try:
        process_ids(tmp_path / "pids", 1)
        assert os.getsid(process.pid) == process.pid != os.getsid(0)
    finally:
        close(process)


def test_the_environment_is_inherited_and_extended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_TEST_INHERITED", "yes")
    process = spawn(MODULE, EchoSettings(str(tmp_path / "pids")), {"TANDEM_TEST_ADDED": "too"})
    try:
        process_ids(tmp_path / "pids", 1)
        environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        assert {b"TANDEM_TEST_INHERITED=yes", b"TANDEM_TEST_ADDED=too"} <= set(environment)
    finally:
        close(process)


def test_settings_that_are_none_of_the_kind_end_the_child() -> None:
    """A child of another version must not guess."""

    class Other(msgspec.Struct):
        place: str

    process = spawn(MODULE, Other("here"))
    try:
        assert process.wait(20) == 1
    finally:
        close(process)
