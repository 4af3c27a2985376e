"""What people may see of the requests of one engine core: `EngineWatch`.

The core tells it what happens, in few calls; it keeps timelines of requests and, on a decode
engine, the series of transfers. A decode step costs it nothing once every row has a token.
"""

from collections.abc import Callable, Iterable
from typing import Any

from tandem.engine.timeline import Timelines
from tandem.engine.transfer_watch import TransferWatch
from tandem.errors import TandemError
from tandem.scheduler.request import EngineRequest, TokenDelta
from tandem.scheduler.step import StepPlan


class EngineWatch:
    """Belongs to the core's loop. `timelines` and `transfers` may be read between its turns."""

    def __init__(self, num_ranks: int, slot_nbytes: int) -> None:
        self.timelines = Timelines()
        self.transfers = TransferWatch(self.timelines, num_ranks, slot_nbytes)
        self._without_token: set[str] = set()  # planned, and nothing sampled for them yet
        self._held: set[str] = set()

    def queued(self, request: EngineRequest) -> None:
        """A request came and waits for its turn."""
        self._begin(request)
        self.timelines.mark(request.request_id, "queued")

    def refused(self, request: EngineRequest, error: TandemError) -> None:
        """A request came and was turned away."""
        if getattr(error, "param", None) == "request_id":
            return  # the id is another request's, and so is the timeline
        self._begin(request)
        self.timelines.end(request.request_id, "refused", str(error))

    def _begin(self, request: EngineRequest) -> None:
        facts: dict[str, Any] = {"prompt_tokens": len(request.prompt_token_ids)}
        if request.generated:
            facts["generated_before"] = len(request.generated)
        self.timelines.begin(request.request_id, **facts)

    def planned(self, plan: StepPlan) -> None:
        """A step is about to run."""
        for new in plan.new_requests:
            self._without_token.add(new.request_id)
            if not self.transfers.is_ready(new.request_id):
                self.timelines.mark(new.request_id, "admitted")

    def sampled(self, plan: StepPlan) -> None:
        """A step has run."""
        if not self._without_token:
            return
        for chunk in plan.chunks:
            if not chunk.sample or chunk.request_id not in self._without_token:
                continue
            self._without_token.remove(chunk.request_id)
            if self.transfers.is_ready(chunk.request_id):
                self.transfers.decoded(chunk.request_id)
                self.timelines.mark(chunk.request_id, "first decode")
            else:
                self.timelines.mark(chunk.request_id, "first token")

    def reported(self, deltas: Iterable[TokenDelta]) -> None:
        """What goes to the clients."""
        for delta in deltas:
            if delta.finish_reason is None:
                continue
            if delta.finish_reason == "hold":
                self._held.add(delta.request_id)
                ticket_id = None if delta.ticket is None else delta.ticket.ticket_id
                self.timelines.describe(delta.request_id, ticket_id=ticket_id)
                self.timelines.mark(delta.request_id, "held")
            elif delta.finish_reason == "error":
                self._end(delta.request_id, "failed", delta.error)
            else:
                self._end(delta.request_id, "finished", delta.finish_reason)

    def aborted(self, request_id: str) -> None:
        self._end(request_id, "aborted", None)

    def freed(self, is_held: Callable[[str], bool]) -> None:
        """Leases may have ended: `is_held(request_id)` says of which requests they have not."""
        for request_id in [name for name in self._held if not is_held(name)]:
            self._held.remove(request_id)
            self._end(request_id, "freed", None)

    def _end(self, request_id: str, name: str, reason: str | None) -> None:
        self._without_token.discard(request_id)
        self.transfers.forget(request_id)
        self.timelines.end(request_id, name, reason)
