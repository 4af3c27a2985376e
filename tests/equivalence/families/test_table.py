"""What the table of models says of each family is what its tests hold."""

from pathlib import Path

import pytest

from tandem.config.model import ModelConfig, SharedBlockConfig
from tandem.models.registry import FAMILIES, load_model_config
from tests.equivalence.families.cases import CASES


def kinds_of(config: ModelConfig) -> set[str]:
    found: set[str] = set()
    for layer in config.layers:
        for mixer in layer.mixers:
            if isinstance(mixer, SharedBlockConfig):
                found |= {mixer.attention.kind, mixer.mixer.kind, mixer.mlp.kind}
            else:
                found.add(mixer.kind)
        if layer.feed_forward is not None:
            found.add(layer.feed_forward.kind)
    return found


@pytest.fixture(scope="module")
def tested(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[set[str], set[int]]]:
    """By title: kinds of layers and sizes of tensor parallelism in any case of the family."""
    found: dict[str, tuple[set[str], set[int]]] = {}
    for name, case in CASES.items():
        folder: Path = tmp_path_factory.mktemp(name)
        case.save(case.build(), folder)
        config = load_model_config(folder)
        kinds, ranks = found.setdefault(FAMILIES[config.family].title, (set(), {1}))
        kinds |= kinds_of(config)
        ranks |= set(case.ranks)
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_tested_with_all_that_it_claims(name: str, tested: dict) -> None:
    family = FAMILIES[name]
    assert family.title in tested, f"no case in cases.py is a {family.title}"
    kinds, ranks = tested[family.title]
    assert kinds == set(family.kinds)
    assert ranks == set(family.tested_tp)
