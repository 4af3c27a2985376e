from prometheus_client.parser import text_string_to_metric_families

from tandem.engine.transfer_watch import (
    BUCKETS_S,
    PARTS,
    PHASES,
    PartAmounts,
    PeerSeries,
    PhaseTimes,
    TransferReport,
)
from tandem.server.metrics import ServerMetrics


def peer(engine_id: str) -> PeerSeries:
    return PeerSeries(
        engine_id=engine_id,
        generation="g",
        address=f"tcp://{engine_id}:1",
        phases={phase: PhaseTimes() for phase in PHASES},
        parts={part: PartAmounts() for part in PARTS},
    )


def samples(report: TransferReport | None) -> dict[tuple[str, ...], float]:
    """Values by name and the values of phase or part, peer, reason and bucket."""
    text = ServerMetrics().render({}, report).decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = (sample.labels.get(key) for key in ("phase", "part", "peer", "reason", "le"))
            found[sample.name, *(label for label in labels if label is not None)] = sample.value
    return {key: value for key, value in found.items() if key[0].startswith("tandem_transfer")}


def test_histograms_counters_and_gauges_of_each_peer() -> None:
    one, other = peer("P1"), peer("P2")
    for seconds in (0.0004, 0.03, 0.03, 1000.0):
        one.phases["transfer"].observe(seconds)
    one.parts["pages"] = PartAmounts(num=3, nbytes=3000, num_descriptors=2)
    other.parts["slots"] = PartAmounts(num=1, nbytes=50, num_descriptors=1)
    report = TransferReport(
        peers=[one, other], failures={"deadline": 2}, num_quarantined=1, quarantined_nbytes=700
    )
    found = samples(report)
    name = "tandem_transfer_phase_seconds"
    assert found[f"{name}_bucket", "transfer", "P1", "0.001"] == 1
    assert found[f"{name}_bucket", "transfer", "P1", "0.025"] == 1
    assert found[f"{name}_bucket", "transfer", "P1", "0.05"] == 3
    assert found[f"{name}_bucket", "transfer", "P1", "60.0"] == 3
    assert found[f"{name}_bucket", "transfer", "P1", "+Inf"] == 4
    assert found[f"{name}_count", "transfer", "P1"] == 4
    assert found[f"{name}_sum", "transfer", "P1"] == 1000.0604
    assert found[f"{name}_count", "handshake", "P2"] == 0
    assert found["tandem_transfer_parts_total", "pages", "P1"] == 3
    assert found["tandem_transfer_bytes_total", "pages", "P1"] == 3000
    assert found["tandem_transfer_descriptors_total", "pages", "P1"] == 2
    assert found["tandem_transfer_bytes_total", "slots", "P2"] == 50
    assert found["tandem_transfer_failures_total", "deadline"] == 2
    assert found["tandem_transfer_quarantined",] == 1
    assert found["tandem_transfer_quarantined_bytes",] == 700
    # A peer's series: its phases with bounds, +Inf, count and sum; three counters of two parts.
    per_peer = len(PHASES) * (len(BUCKETS_S) + 3) + 3 * len(PARTS)
    assert len(found) == 2 * per_peer + 3


def test_what_transfers_nothing_has_no_series() -> None:
    assert samples(None) == {}
