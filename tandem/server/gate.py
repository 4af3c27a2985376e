"""The gate of a server: open, or closed for good because the server is being stopped."""

from collections.abc import Iterator
from contextlib import contextmanager

from tandem.errors import DrainingError


class Gate:
    """Lets requests in until it is closed, and counts those of the public endpoints inside."""

    def __init__(self) -> None:
        self.is_closed = False
        self.num_inside = 0

    def close(self) -> None:
        """What is inside goes on; nothing new comes in."""
        self.is_closed = True

    def check(self) -> None:
        """Raises: DrainingError once it is closed."""
        if self.is_closed:
            raise DrainingError(
                "this server is being stopped: it finishes what it has and takes nothing new; try "
                "another one, or again later"
            )

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The time that one request takes."""
        self.num_inside += 1
        try:
            yield
        finally:
            self.num_inside -= 1
