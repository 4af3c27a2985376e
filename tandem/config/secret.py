"""The cluster secret: where it comes from, and where an engine may do without one.

The secret is never a flag's value, never logged and in no settings: only the path of its file is.
"""

import ipaddress
import os
import secrets
import stat
from pathlib import Path

from tandem.errors import ConfigError
from tandem.log import get_logger

log = get_logger(__name__)

SECRET_VARIABLE = "TANDEM_CLUSTER_SECRET"
MIN_SECRET_NBYTES = 32
_MAX_SECRET_NBYTES = 4096
_HOW = "make one with `openssl rand -hex 32` and give the same to every engine and router"


def read_cluster_secret(path: str | None) -> bytes | None:
    """The secret in the file at `path`, else in TANDEM_CLUSTER_SECRET, without blanks around it;
    None if neither is given.

    Raises: ConfigError for a file that cannot be read, and for a secret that is empty or short.
    """
    if path is not None:
        return _checked(_read(path), f"cluster_secret_file={path!r}")
    value = os.environ.get(SECRET_VARIABLE)
    return None if value is None else _checked(os.fsencode(value), SECRET_VARIABLE)


def new_cluster_secret() -> str:
    """A random secret, for processes that are started together."""
    return secrets.token_hex(32)


def _read(path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                log.warning("%s can be read by other users of this machine; chmod 600 it", path)
            return file.read(_MAX_SECRET_NBYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"cluster_secret_file={path!r} cannot be read: {error.strerror}; {_HOW}"
        ) from error


def _checked(secret: bytes, source: str) -> bytes:
    """The message tells the length of a bad secret, never its bytes."""
    secret = secret.strip()
    if not MIN_SECRET_NBYTES <= len(secret) <= _MAX_SECRET_NBYTES:
        raise ConfigError(
            f"{source} holds a secret of {len(secret)} bytes; expected {MIN_SECRET_NBYTES} to "
            f"{_MAX_SECRET_NBYTES}: {_HOW}"
        )
    return secret


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. Names other than localhost are not looked up."""
    bare = host.removeprefix("[").removesuffix("]")
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return bare == "localhost"


def require_secret(secret: bytes | None, setting: str, host: str) -> None:
    """Raises: ConfigError if others than this machine reach `host` and no secret keeps them out."""
    if secret is None and not is_loopback(host):
        raise ConfigError(
            f"{setting}={host!r} can be reached from other machines and there is no cluster "
            f"secret; give --cluster-secret-file or {SECRET_VARIABLE} ({_HOW}), or use 127.0.0.1"
        )
