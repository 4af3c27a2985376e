"""One prefill engine, two decode engines and a router, shared by all tests: mend() it first."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.bench.faults.cluster import Cluster
from tests.e2e.conftest import model_folder

__all__ = ["model_folder"]

FLAGS = ("--arena-mib", "8", "--max-num-seqs", "8", "--max-model-len", "1024", "--threads", "1")


@pytest.fixture(scope="session")
def cluster(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    flags = (*FLAGS, "--lease-s", "8", "--deadline-s", "2", "--log-level", "INFO")
    with Cluster(
        str(model_folder),
        folder,
        num_prefill=1,
        num_decode=2,
        flags=flags,
        environment={"UCX_TLS": "tcp,self"},
    ) as cluster:
        yield cluster.start()
