"""Signs what the router sends to its engines with the cluster secret (server/trust.py)."""

from collections.abc import Generator

import httpx

from tandem.server.trust import ClusterKey


class SignedRequests(httpx.Auth):
    """For the client that all engines are asked through."""

    requires_request_body = True

    def __init__(self, key: ClusterKey) -> None:
        self._key = key

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        request.headers["authorization"] = self._key.sign(
            request.method, request.url.path, request.content
        )
        yield request
