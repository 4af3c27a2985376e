"""Command-line flags generated from the settings' sections (config/engine.py).

One field, one flag: `max_num_seqs` -> `--max-num-seqs`, and `--no-...` to turn one off that is a
matter of yes or no. It knows no command.
"""

import inspect
import typing
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any

import msgspec
import typer

from tandem.config.engine import (
    CacheOptions,
    EngineConfig,
    ModelOptions,
    ParallelOptions,
    SchedulerOptions,
    TransferOptions,
)
from tandem.errors import ConfigError

SECTIONS: dict[str, type] = {
    "model_options": ModelOptions,
    "cache": CacheOptions,
    "scheduler": SchedulerOptions,
    "parallel": ParallelOptions,
    "transfer": TransferOptions,
}


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def _off(flag: str) -> str:
    return "--no-" + flag.removeprefix("--")


def setting_names() -> list[str]:
    """Every setting, in the order of its section."""
    return [item.name for section in SECTIONS.values() for item in fields(section)]


def flag_parameters() -> list[inspect.Parameter]:
    """Keyword parameters, one per setting, in the form that typer turns into options."""
    parameters = []
    for section in SECTIONS.values():
        hints = typing.get_type_hints(section)
        for item in fields(section):
            flag = flag_name(item.name)
            names = f"{flag}/{_off(flag)}" if hints[item.name] is bool else flag
            option = typer.Option(names, help=item.metadata["help"])
            parameters.append(
                inspect.Parameter(
                    item.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=item.default,
                    annotation=Annotated[hints[item.name], option],
                )
            )
    return parameters


def build_config(model: str, values: Mapping[str, Any]) -> EngineConfig:
    """Sort flag values into their sections. Values that are absent keep their defaults.

    Raises: ConfigError for a value that a section refuses, or of another type.
    """
    sections = {name: section(**_given(section, values)) for name, section in SECTIONS.items()}
    return EngineConfig(model=model, **sections)


def _given(section: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values for one section. Those of a command line have their types; others may not."""
    hints = typing.get_type_hints(section)
    given = {item.name: values[item.name] for item in fields(section) if item.name in values}
    for name, value in given.items():
        try:
            msgspec.convert(value, hints[name])
        except msgspec.ValidationError as error:
            raise ConfigError(f"{name}={value!r}: {error}") from error
    return given


def command_line(config: EngineConfig) -> list[str]:
    """The flags that differ from their defaults: what another process needs to build `config`."""
    words: list[str] = []
    for name, section in SECTIONS.items():
        value = getattr(config, name)
        for item in fields(section):
            setting = getattr(value, item.name)
            flag = flag_name(item.name)
            if setting == item.default:
                continue
            if isinstance(setting, bool):
                words.append(flag if setting else _off(flag))
            else:
                words += [flag, str(setting)]
    return words
