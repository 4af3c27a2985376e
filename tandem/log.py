"""Loggers with fields taken from context (role, rank, request_id).

`get_logger(__name__)` everywhere; `configure()` once per process. It knows no engine.
"""

import contextvars
import logging
import os
import sys

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

_fields: contextvars.ContextVar[dict[str, str] | None] = contextvars.ContextVar(
    "tandem_log_fields", default=None
)
_process_fields: dict[str, str] = {}


class _FieldFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {**_process_fields, **(_fields.get() or {})}
        record.fields = "".join(f" {name}={value}" for name, value in fields.items())
        return super().format(record)


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; records carry the fields bound in this process and context."""
    return logging.getLogger(name)


def bind(**fields: object) -> None:
    """Attach fields to every later record of this process (role, rank)."""
    _process_fields.update({name: str(value) for name, value in fields.items()})


def bind_context(**fields: object) -> contextvars.Token[dict[str, str] | None]:
    """Attach fields to the records of the current context (request_id); reset with the token."""
    merged = {**(_fields.get() or {}), **{name: str(value) for name, value in fields.items()}}
    return _fields.set(merged)


def configure(level: str | None = None) -> None:
    """Send `tandem.*` records to stderr. Level from the argument, else TANDEM_LOG, else INFO.

    Raises: ValueError for a level that does not exist; the command line checks before.
    """
    root = logging.getLogger("tandem")
    root.setLevel((level or os.environ.get("TANDEM_LOG") or "INFO").upper())
    root.propagate = False
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(
            _FieldFormatter("%(asctime)s %(levelname).1s %(name)s%(fields)s: %(message)s")
        )
        root.addHandler(handler)
