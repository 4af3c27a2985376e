"""Peers that lie to a decode engine: each costs its own request a recompute, and nothing else."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tandem.bench.faults.cluster import Cluster, wait_for
from tandem.bench.faults.liar import LIES, read_through, tokens_of
from tandem.transfer.seal import bare

pytestmark = [pytest.mark.nixl, pytest.mark.slow]

PROMPT = list(range(60, 130))
DECODE = ("transfer_num_done", "failed_reads_total")


@pytest.mark.timeout(240)
def test_whatever_a_peer_says_the_answer_is_right(cluster: Cluster) -> None:
    cluster.mend()
    p, d = cluster.prefill[0], cluster.decode[0]

    def numbers() -> list[float]:
        pools = d.pools()
        return [pools[name] for name in DECODE]

    before = numbers()
    truth = tokens_of(read_through(p.url, d.url, bare, PROMPT, len(LIES)))
    assert numbers() == [before[0] + 1, before[1]]
    assert len(set(truth)) > 4
    incarnation = p.pids() + d.pids()
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(
            lambda item: tokens_of(read_through(p.url, d.url, item[1], PROMPT, item[0])),
            enumerate(LIES.values()),
        )
        for what, answer in zip(LIES, answers, strict=True):
            assert answer == truth, what
    done, failed = numbers()
    assert (done, failed) == (before[0] + 1, before[1] + len(LIES)), "a lie was believed"
    assert p.pids() + d.pids() == incarnation
    wait_for(
        lambda: all(engine.pools().get("is_idle") for engine in (p, d)), 60, "memory is not back"
    )
    # The liars' victims trust the engine itself as before.
    assert tokens_of(read_through(p.url, d.url, bare, PROMPT, len(LIES) + 1)) == truth
    assert numbers() == [done + 1, failed]
