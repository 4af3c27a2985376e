"""The series of an engine's transfers (engine/transfer_watch.py) in Prometheus' terms."""

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from tandem.engine.transfer_watch import BUCKETS_S, PeerSeries, TransferReport

_BOUNDS = (*(str(bound) for bound in BUCKETS_S), "+Inf")


class TransferCollector(Collector):
    """Collects `report`, which whoever renders sets before; without one it has no series."""

    def __init__(self) -> None:
        self.report: TransferReport | None = None

    def collect(self) -> Iterator[Metric]:
        report = self.report
        if report is None:
            return
        yield _phases(report.peers)
        for field, help in (
            ("num", "pages and slots read"),
            ("nbytes", "bytes read"),
            ("num_descriptors", "descriptors read, neighbours joined"),
        ):
            yield _parts(report.peers, field, help)
        failures = CounterMetricFamily(
            "tandem_transfer_failures", "reads that brought no state", labels=["reason"]
        )
        for reason, count in sorted(report.failures.items()):
            failures.add_metric([reason], count)
        yield failures
        yield GaugeMetricFamily(
            "tandem_transfer_quarantined",
            "given-up reads whose bytes may still arrive",
            report.num_quarantined,
        )
        yield GaugeMetricFamily(
            "tandem_transfer_quarantined_bytes",
            "memory that given-up reads keep from others, all ranks",
            report.quarantined_nbytes,
        )


def _phases(peers: list[PeerSeries]) -> Metric:
    family = HistogramMetricFamily(
        "tandem_transfer_phase_seconds",
        "time of a read's phases",
        labels=["phase", "peer", "address"],
    )
    for peer in peers:
        for phase, times in peer.phases.items():
            buckets = list(zip(_BOUNDS, map(float, accumulate(times.counts)), strict=True))
            family.add_metric([phase, peer.engine_id, peer.address], buckets, times.sum_s)
    return family


_NAMES = {"num": "parts", "nbytes": "bytes", "num_descriptors": "descriptors"}


def _parts(peers: list[PeerSeries], field: str, help: str) -> Metric:
    family = CounterMetricFamily(
        f"tandem_transfer_{_NAMES[field]}", help, labels=["part", "peer", "address"]
    )
    for peer in peers:
        for part, amounts in peer.parts.items():
            value = getattr(amounts, field)
            family.add_metric([part, peer.engine_id, peer.address], value)
    return family
