"""The tree of errors that users, peers and checkpoints can cause.

A message states what was wrong, what was got, what was expected and what to do. `assert` is kept
for what only a bug of ours can break.
"""


class TandemError(Exception):
    """Root of every error that Tandem raises on purpose."""


class ConfigError(TandemError):
    """A flag, an engine setting or a combination of them that cannot work."""


class ModelError(TandemError):
    """A checkpoint that is missing, broken, or of a kind that is not supported."""


class ShardingError(ModelError):
    """Units of a component that neither divide by, nor replicate to, the tensor-parallel size."""


class ShapeError(TandemError):
    """A tensor argument whose shape or dtype does not fit; the message names the argument."""


class RequestError(TandemError):
    """A request that is refused: bad field, too long, unsupported option. Maps to HTTP 400."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class CapacityError(TandemError):
    """There is not enough memory for what was asked, now (pool) or ever (plan)."""


class TransferError(TandemError):
    """State could not be moved between engines."""


class HandshakeError(TransferError):
    """A peer that speaks another version or holds another model; names field and both values."""


class PeerLostError(TransferError):
    """A peer that died, went silent or answered after the deadline."""


class LeaseError(TransferError):
    """A ticket whose lease has ended, or whose generation is not this engine's."""


class DrainingError(TandemError):
    """A server that is being stopped takes no new requests; another one may. Maps to HTTP 503."""


class EngineDeadError(TandemError):
    """The engine process has ended; no request can be served any more."""
