"""Flags are the settings' fields, one to one, and come back as the config that they describe."""

import inspect
import typing
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.config.args import (
    SECTIONS,
    build_config,
    command_line,
    flag_name,
    flag_parameters,
    setting_names,
)
from tandem.config.engine import EngineConfig
from tandem.errors import ConfigError

# Values that every section accepts, by setting; each list begins with the default.
VALUES: dict[str, list[Any]] = {
    "dtype": [None, "float32", "bfloat16"],
    "state_dtype": [None, "bfloat16"],
    "state_rounding": ["auto", "nearest", "stochastic"],
    "served_name": [None, "a name with blanks"],
    "load_format": ["checkpoint", "random"],
    "page_tokens": [16, 8, 128],
    "arena_mib": [None, 1, 4096],
    "prefix_cache": [True, False],
    "max_num_seqs": [64, 1],
    "max_model_len": [None, 2, 100000],
    "drain_s": [30.0, 0.0],
    "budget_tokens": [2048, 1],
    "overlap": ["auto", "on", "off"],
    "decode_graphs": ["auto", "off", "1,8,64"],
    "prefill_graphs": ["auto", "off", "256,1024"],
    "tp": [1, 8],
    "threads": [0, 3],
    "role": ["colocated", "prefill", "decode"],
    "transfer": ["pull", "push"],
    "side_channel_host": ["127.0.0.1", "::1"],
    "side_channel_port": [0, 5600],
    "cluster_secret_file": [None, "secret.txt"],
    "lease_s": [30.0, 12.5],
    "deadline_s": [10.0, 0.25],
    "quarantine_s": [60.0, 0.5],
    "on_failure": ["recompute", "fail"],
    "stream_reads": [True, False],
}
choices = st.fixed_dictionaries({name: st.sampled_from(items) for name, items in VALUES.items()})


def parse(words: list[str]) -> dict[str, Any]:
    """As the command line does: each flag with its field's type."""
    hints = {
        flag_name(name): (name, hint)
        for section in SECTIONS.values()
        for name, hint in typing.get_type_hints(section).items()
    }
    values: dict[str, Any] = {}
    left = iter(words)
    for flag in left:
        if flag.startswith("--no-"):
            values[hints["--" + flag.removeprefix("--no-")][0]] = False
            continue
        word = next(left)
        name, hint = hints[flag]
        kinds = [kind for kind in typing.get_args(hint) or (hint,) if kind is not type(None)]
        values[name] = kinds[0](word)
    return values


def test_every_setting_has_an_example_here() -> None:
    assert set(VALUES) == set(setting_names())
    assert len(setting_names()) == len(set(setting_names()))
    config = build_config("m", {})
    for section in SECTIONS:
        for item in fields(getattr(config, section)):
            assert getattr(getattr(config, section), item.name) == VALUES[item.name][0]


def test_every_section_of_the_config_has_flags() -> None:
    assert {"model", *SECTIONS} == {item.name for item in fields(EngineConfig)}


@given(choices)
def test_a_command_line_builds_the_config_it_came_from(values: dict[str, Any]) -> None:
    config = build_config("some/model", values)
    words = command_line(config)
    assert build_config("some/model", parse(words)) == config
    # Defaults are left out.
    changed = [value for name, value in values.items() if value != VALUES[name][0]]
    assert len(words) == sum(1 if isinstance(value, bool) else 2 for value in changed)


@given(choices)
def test_each_value_lands_in_its_section(values: dict[str, Any]) -> None:
    config = build_config("some/model", values)
    assert config.model == "some/model"
    for name, section in SECTIONS.items():
        part = getattr(config, name)
        assert isinstance(part, section)
        for item in fields(section):
            assert getattr(part, item.name) == values[item.name]


def test_flags_are_keywords_with_help_default_and_type() -> None:
    parameters = flag_parameters()
    assert [parameter.name for parameter in parameters] == setting_names()
    for parameter in parameters:
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert parameter.default == VALUES[parameter.name][0]
        kind, option = typing.get_args(parameter.annotation)
        assert option.help
        flag = flag_name(parameter.name)
        names = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
        assert names in (option.default, *(option.param_decls or ()))
        assert isinstance(VALUES[parameter.name][1], typing.get_args(kind) or kind)


def test_names_become_flags_with_hyphens() -> None:
    assert flag_name("max_num_seqs") == "--max-num-seqs"
    assert flag_name("tp") == "--tp"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"page_tokens": 96 + 4}, "page_tokens=100 is no positive multiple of 8; use 16"),
        ({"page_tokens": 0}, "page_tokens=0"),
        ({"arena_mib": 0}, "arena_mib=0; expected at least 1"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"budget_tokens": 0}, "budget_tokens=0"),
        ({"max_model_len": 1}, "max_model_len=1; expected at least 2"),
        ({"tp": 0}, "tp=0"),
        ({"threads": -1}, "threads=-1"),
        ({"role": "both"}, "role='both'; expected colocated, prefill or decode"),
        ({"transfer": "copy"}, "transfer='copy'; expected pull or push"),
        ({"on_failure": "retry"}, "on_failure='retry'; expected recompute or fail"),
        ({"load_format": "dummy"}, "load_format='dummy'; expected checkpoint or random"),
        ({"state_rounding": "up"}, "state_rounding='up'; expected auto, nearest or stochastic"),
        ({"deadline_s": 30.0}, "deadline_s=30.0 must be positive and below lease_s=30.0"),
        ({"deadline_s": 0.0}, "deadline_s=0.0"),
        ({"quarantine_s": 0.0}, "quarantine_s=0.0; expected more than 0"),
        ({"lease_s": 5.0}, "a reader must give up before its lease ends"),
    ],
)
def test_values_that_cannot_work_are_refused_with_what_would(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        build_config("m", values)
    assert message in str(refused.value)
