"""What happened to the last requests, and when: `Timelines`, shown by /debug/requests.

Marks are names with a time and a few plain values; no tokens and no text of a request. An engine
keeps one, a router another. It decides nothing and is never read by what serves requests.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# Ended requests that are kept, and marks of one request: a request that is preempted or retried
# again and again keeps its first ones, and its end.
MAX_ENDED = 256
MAX_MARKS = 64
_MAX_SHOWN = 1024
_MAX_TEXT_CHARS = 300


@dataclass
class _Timeline:
    arrived_at: float  # Unix seconds, for people
    start: float  # on the clock of the marks
    state: str
    facts: dict[str, Any] = field(default_factory=dict)
    marks: list[tuple[str, float, dict[str, Any]]] = field(default_factory=list)
    num_dropped: int = 0


class Timelines:
    """Marks of requests by id. Not thread-safe: all calls belong to one thread."""

    def __init__(
        self, max_ended: int = MAX_ENDED, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_ended = max_ended
        self._clock = clock
        self._live: dict[str, _Timeline] = {}
        self._ended: OrderedDict[int, tuple[str, _Timeline]] = OrderedDict()
        self._num_ended = 0

    def begin(self, request_id: str, name: str = "arrived", **facts: Any) -> None:
        """A request came. `facts` describe it as a whole (role, number of tokens, peer)."""
        timeline = _Timeline(time.time(), self._clock(), name, facts)
        timeline.marks.append((name, 0.0, {}))
        self._live[request_id] = timeline

    def describe(self, request_id: str, **facts: Any) -> None:
        """Add to what is known of the request as a whole."""
        timeline = self._live.get(request_id)
        if timeline is not None:
            timeline.facts.update(facts)

    def mark(self, request_id: str, name: str, *, at: float | None = None, **values: Any) -> None:
        """Something happened to a request, now or `at` a time on the clock. Ids that did not begin
        or have ended are ignored: what comes late is no news."""
        timeline = self._live.get(request_id)
        if timeline is None:
            return
        timeline.state = name
        if len(timeline.marks) >= MAX_MARKS:
            timeline.num_dropped += 1
            return
        now = self._clock() if at is None else at
        timeline.marks.append((name, (now - timeline.start) * 1000, values))

    def end(self, request_id: str, name: str, reason: str | None = None) -> None:
        """The last mark of a request: finished, aborted, failed, refused, ..."""
        timeline = self._live.pop(request_id, None)
        if timeline is None:
            return
        timeline.state = name
        # Errors may quote what a client sent, at any length.
        values = {} if reason is None else {"reason": reason[:_MAX_TEXT_CHARS]}
        timeline.marks.append((name, (self._clock() - timeline.start) * 1000, values))
        self._ended[self._num_ended] = request_id, timeline
        self._num_ended += 1
        while len(self._ended) > self._max_ended:
            self._ended.popitem(last=False)

    def table(self) -> list[dict[str, Any]]:
        """The requests that have not ended, oldest first, then the ended ones, the last first.

        Each: request_id, state (the last mark), arrived_at (Unix seconds), its facts, and events:
        name, ms since arrival, values.
        """
        rows = list(self._live.items())[:_MAX_SHOWN]
        rows += reversed(self._ended.values())
        return [_row(request_id, timeline) for request_id, timeline in rows]


def _row(request_id: str, timeline: _Timeline) -> dict[str, Any]:
    row: dict[str, Any] = {
        "request_id": request_id,
        "state": timeline.state,
        "arrived_at": round(timeline.arrived_at, 3),
        **timeline.facts,
        "events": [
            {"event": name, "ms": round(ms, 3), **values} for name, ms, values in timeline.marks
        ],
    }
    if timeline.num_dropped:
        row["num_events_dropped"] = timeline.num_dropped
    return row
