"""Numbers of the HTTP application for Prometheus, and the engine's own beside them."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from tandem.engine.transfer_watch import TransferReport
from tandem.server.generation import ChoiceDelta
from tandem.server.transfer_metrics import TransferCollector

_LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class _EngineGauges(Collector):
    """The numbers of `Backend.stats()` as of the last scrape: `free_pages` is
    `tandem_engine_free_pages`."""

    def __init__(self) -> None:
        self.stats: Mapping[str, Any] = {}

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, value in sorted(self.stats.items()):
            if isinstance(value, int | float):
                yield GaugeMetricFamily(f"tandem_engine_{name}", f"{name} of the engine", value)


class ServerMetrics:
    """One registry an application, so that several can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._engine = _EngineGauges()
        self.registry.register(self._engine)
        self._transfers = TransferCollector()
        self.registry.register(self._transfers)
        self._requests = Counter(
            "tandem_requests",
            "HTTP requests answered",
            ["endpoint", "status"],
            registry=self.registry,
        )
        self._finished = Counter(
            "tandem_sequences_finished",
            "sequences by finish reason",
            ["reason"],
            registry=self.registry,
        )
        self._disconnects = Counter(
            "tandem_client_disconnects", "requests whose client left early", registry=self.registry
        )
        self._prompt_tokens = Counter(
            "tandem_prompt_tokens", "tokens of admitted prompts", registry=self.registry
        )
        self._generated_tokens = Counter(
            "tandem_generated_tokens", "tokens of answers", registry=self.registry
        )
        # Counted here first: a counter's lock costs more than a token's text.
        self.num_uncounted_tokens = 0
        self._running = Gauge(
            "tandem_requests_running", "requests being answered", registry=self.registry
        )
        self._first_token = Histogram(
            "tandem_time_to_first_token_seconds",
            "from the request's arrival to a sequence's first token",
            buckets=_LATENCY_BUCKETS,
            registry=self.registry,
        )
        self._per_token = Histogram(
            "tandem_time_per_output_token_seconds",
            "mean time between a sequence's tokens after its first",
            buckets=_LATENCY_BUCKETS,
            registry=self.registry,
        )

    def answered(self, endpoint: str, status: int) -> None:
        self._requests.labels(endpoint, str(status)).inc()

    def disconnected(self) -> None:
        self._disconnects.inc()

    def watch(self, num_prompt_tokens: int, num_choices: int) -> "RequestWatch":
        return RequestWatch(self, num_prompt_tokens, num_choices)

    def render(
        self, engine_stats: Mapping[str, Any], transfers: TransferReport | None = None
    ) -> bytes:
        """The text that Prometheus scrapes."""
        self._generated_tokens.inc(self.num_uncounted_tokens)
        self.num_uncounted_tokens = 0
        self._transfers.report = transfers
        self._engine.stats = engine_stats
        return generate_latest(self.registry)


class RequestWatch:
    """Times one request and counts its tokens. A context manager over the request's life."""

    def __init__(self, metrics: ServerMetrics, num_prompt_tokens: int, num_choices: int) -> None:
        self._metrics = metrics
        self._num_prompt_tokens = num_prompt_tokens
        self._start = time.perf_counter()
        self._first: list[float | None] = [None] * num_choices
        self.num_generated = [0] * num_choices

    def __enter__(self) -> "RequestWatch":
        self._metrics._running.inc()
        self._metrics._prompt_tokens.inc(self._num_prompt_tokens)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._metrics._running.dec()

    def saw(self, item: ChoiceDelta) -> None:
        count = item.delta.num_generated
        self._metrics.num_uncounted_tokens += count - self.num_generated[item.index]
        self.num_generated[item.index] = count
        first = self._first[item.index]
        if first is not None and item.delta.finish_reason is None:
            return
        now = time.perf_counter()
        if first is None and count:
            self._first[item.index] = first = now
            self._metrics._first_token.observe(now - self._start)
        if item.delta.finish_reason is not None:
            self._metrics._finished.labels(item.delta.finish_reason).inc()
            if first is not None and count > 1:
                self._metrics._per_token.observe((now - first) / (count - 1))
