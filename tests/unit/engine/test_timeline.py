from tandem.engine.timeline import MAX_MARKS, Timelines


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def names(row: dict[str, object]) -> list[str]:
    return [event["event"] for event in row["events"]]  # type: ignore[index]


def test_marks_are_in_ms_since_arrival_with_their_values() -> None:
    clock = Clock()
    timelines = Timelines(clock=clock)
    timelines.begin("r", prompt_tokens=7)
    clock.now += 0.25
    timelines.mark("r", "handshake", at=100.125)
    timelines.mark("r", "part 0 posted", pages=3)
    timelines.describe("r", peer="P")
    (row,) = timelines.table()
    assert (row["request_id"], row["state"], row["prompt_tokens"], row["peer"]) == (
        *("r", "part 0 posted"),
        *(7, "P"),
    )
    assert row["events"] == [
        {"event": "arrived", "ms": 0.0},
        {"event": "handshake", "ms": 125.0},
        {"event": "part 0 posted", "ms": 250.0, "pages": 3},
    ]
    clock.now += 1
    timelines.end("r", "failed", "x" * 1000)
    (row,) = timelines.table()
    assert row["state"] == "failed"
    assert row["events"][-1] == {"event": "failed", "ms": 1250.0, "reason": "x" * 300}


def test_running_requests_come_first_and_the_last_ended_next() -> None:
    timelines = Timelines(max_ended=2)
    for index in range(5):
        timelines.begin(f"r{index}")
    for index in (3, 0, 4):
        timelines.end(f"r{index}", "finished", "stop")
    assert [row["request_id"] for row in timelines.table()] == ["r1", "r2", "r4", "r0"]


def test_memory_is_bounded() -> None:
    timelines = Timelines(max_ended=10)
    timelines.begin("busy")
    for _ in range(10_000):
        timelines.mark("busy", "admitted")
    for index in range(10_000):
        timelines.begin(f"r{index}")
        timelines.end(f"r{index}", "finished")
    timelines.end("busy", "finished")
    rows = timelines.table()
    assert len(rows) == 10
    assert len(rows[0]["events"]) == MAX_MARKS + 1
    assert rows[0]["num_events_dropped"] == 10_001 - MAX_MARKS
    assert names(rows[0])[-1] == "finished"


def test_what_comes_for_nobody_is_ignored() -> None:
    timelines = Timelines()
    timelines.begin("r")
    timelines.end("r", "aborted")
    timelines.mark("r", "late")
    timelines.describe("r", late=1)
    timelines.end("r", "finished")
    timelines.mark("unknown", "late")
    (row,) = timelines.table()
    assert names(row) == ["arrived", "aborted"]
    assert "late" not in row


def test_an_id_may_come_again() -> None:
    timelines = Timelines()
    for name in ("finished", "aborted"):
        timelines.begin("r")
        timelines.end("r", name)
    assert [row["state"] for row in timelines.table()] == ["aborted", "finished"]
