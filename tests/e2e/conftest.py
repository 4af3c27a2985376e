"""A tiny model with a tokenizer, and servers of it: one engine, and a pair behind a router."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.serving import MODEL, Served
from tests.tiny_models import save_tiny
from tests.unit.tokenizers import byte_level


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In several shards; vocabularies of model and tokenizer are the same."""
    folder = tmp_path_factory.mktemp("e2e") / MODEL
    tokenizer = byte_level()
    save_tiny("nemotron_h", folder, vocab_size=321, max_shard_size="200KB")
    assert tokenizer.decode([320])
    assert not tokenizer.decode([321])
    for name, content in tokenizer.files().items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def single_server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(model_folder, tmp_path_factory.mktemp("single") / "log")
    yield served
    served.close()


@pytest.fixture(scope="module")
def pair_server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = ("--prefill", "1", "--decode", "1", "--prefill-page-tokens", "24")
    served = Served(model_folder, tmp_path_factory.mktemp("pair") / "log", flags)
    yield served
    served.close()


@pytest.fixture
def single(single_server: Served) -> Served:
    single_server.wait_until_ready()
    return single_server


@pytest.fixture
def pair(pair_server: Served) -> Served:
    """Ready, also after a test that took one of its engines away."""
    pair_server.wait_until_ready()
    pair_server.wait_until_state_moves()
    return pair_server
