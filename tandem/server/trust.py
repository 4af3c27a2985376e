"""Proof of the cluster secret over HTTP, between a router and its engines.

A router signs each request: method, path, a nonce and the digest of the body, by HMAC-SHA256 with a
key derived from the secret, in the Authorization header. So an engine refuses a stranger before
it reads a body, and whoever records a request learns nothing that another one needs. An engine
proves itself in its answer to a probe. There are no clocks, and nothing is encrypted.
"""

import hashlib
import hmac
import os
import re

from tandem.server.api_error import ApiError

PROOF_HEADER = "tandem-proof"
_SCHEME = "Tandem"
_HEADER = re.compile(rf"{_SCHEME} ([0-9a-f]{{32}})\.([0-9a-f]{{64}})\.([0-9a-f]{{64}})")
_SAME_SECRET = "start router and engines with the same --cluster-secret-file"


class ClusterKey:
    """The key of HTTP's proofs. It is shown by nothing."""

    def __init__(self, secret: bytes) -> None:
        self._key = hmac.digest(secret, b"tandem internal http", "sha256")

    def sign(self, method: str, path: str, body: bytes) -> str:
        """The value of the Authorization header."""
        nonce, digest = os.urandom(16).hex(), hashlib.sha256(body).hexdigest()
        return f"{_SCHEME} {nonce}.{digest}.{self._mac('request', method, path, nonce, digest)}"

    def check(self, authorization: str | None, method: str, path: str) -> str:
        """The digest that the body has to have. Raises: ApiError 401 for anybody else's header."""
        if authorization is None:
            raise _refusal("this engine asks for the cluster secret")
        match = _HEADER.fullmatch(authorization)
        if match is None:
            raise _refusal(f"the Authorization header is none of scheme {_SCHEME}")
        nonce, digest, mac = match.groups()
        if not hmac.compare_digest(mac, self._mac("request", method, path, nonce, digest)):
            raise _refusal("the request is signed with another cluster secret, or was changed")
        return digest

    def check_body(self, body: bytes, digest: str) -> None:
        """Raises: ApiError 401 for another body than the one that was signed."""
        if not hmac.compare_digest(hashlib.sha256(body).hexdigest(), digest):
            raise _refusal("the body is not the one that was signed")

    def prove(self, authorization: str) -> str:
        """An engine's answer to a checked header."""
        return self._mac("reply", authorization)

    def is_proof(self, proof: str | None, authorization: str) -> bool:
        """Whether an engine that was sent this header knows the secret."""
        return proof is not None and hmac.compare_digest(
            proof.encode(), self.prove(authorization).encode()
        )

    def _mac(self, *parts: str) -> str:
        # No part holds a line feed: methods, paths and hexadecimal digits.
        return hmac.digest(self._key, "\n".join(parts).encode(), "sha256").hex()


def _refusal(message: str) -> ApiError:
    return ApiError(f"{message}; {_SAME_SECRET}", status=401, code="untrusted")
