"""The table of kinds in docs/layouts.md names every kind and component."""

import re

from tandem.config.model import (
    AttentionConfig,
    GatedDeltaConfig,
    KimiDeltaConfig,
    LatentAttentionConfig,
    LinearAttentionConfig,
    LowRankMamba2Config,
    Mamba1Config,
    Mamba2Config,
    RgLruConfig,
    ShortConvConfig,
)
from tandem.state.kinds import KINDS, components_of
from tests.docs.markdown import ROOT

MIXERS = [
    AttentionConfig(4, 2, 8, 1.0, False, None),
    LatentAttentionConfig(4, 8, 4, 4, 4, 1.0, False, None),
    Mamba1Config(8, 4, 2, 4, True, False),
    Mamba2Config(4, 4, 2, 4, 4, True, False, (0.0, 1.0), 16, 1e-5),
    LowRankMamba2Config(4, 4, 4, 2, 4, 1e-5),
    GatedDeltaConfig(2, 4, 4, 4, 4, 1.0, 1e-5, "grouped"),
    KimiDeltaConfig(4, 4, 4, None, 1e-5, "full"),
    ShortConvConfig(8, 3, False),
    LinearAttentionConfig(4, 4, (0.1,) * 4, 1e-5),
    RgLruConfig(4, 4, 4),
]


def test_every_kind_and_component_has_its_row() -> None:
    page = (ROOT / "docs" / "layouts.md").read_text()
    found: dict[str, set[str]] = {}
    for kind, names in re.findall(r"^\| (\w+) \| ((?:`[\w.]+`(?:, )?)+)", page, re.MULTILINE):
        found.setdefault(kind, set()).update(re.findall(r"`([\w.]+)`", names))
    expected = {
        mixer.kind: {item.name for item in components_of(mixer, "bfloat16", "float32")}
        for mixer in MIXERS
    }
    assert {*expected, "shared_block"} == set(KINDS)
    assert {kind: found.get(kind) for kind in expected} == expected
