"""Typed access to the keys of an HF folder's config.json.

It knows no model. A value that is not supported is refused by name; nothing is guessed silently.
"""

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.errors import ModelError

# Beyond any model: larger numbers are typing errors that would end in sums nobody can allocate.
MAX_SIZE = 1 << 24
MAX_HEADS = 1 << 16
MAX_LAYERS = 1 << 12
MAX_POSITION = 1 << 31
_FLOAT_MAX = sys.float_info.max


class Keys:
    """Typed access to config.json; every complaint names the key, the value and the file."""

    def __init__(self, raw: Mapping[str, Any], source: Path) -> None:
        self._raw = raw
        self.source = source

    def has(self, key: str) -> bool:
        return self._raw.get(key) is not None

    def get(self, *keys: str, default: Any = None) -> Any:
        for key in keys:
            if self._raw.get(key) is not None:
                return self._raw[key]
        return default

    def integer(
        self,
        *keys: str,
        default: int | None = None,
        minimum: int = 1,
        maximum: int = MAX_SIZE,
    ) -> int:
        value = self.get(*keys, default=default)
        name = keys[0]
        if value is None:
            raise ModelError(f"{self.source}: key {name!r} is missing; it must be an integer")
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ModelError(f"{self.source}: {name}={value!r}; expected an integer >= {minimum}")
        if value > maximum:
            raise ModelError(f"{self.source}: {name} exceeds {maximum}, the largest supported")
        return value

    def number(self, *keys: str, default: float) -> float:
        """Positive and finite, as every number of a model is."""
        value = self.get(*keys, default=default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{self.source}: {keys[0]}={value!r}; expected a number")
        if not 0 < value < _FLOAT_MAX:
            raise ModelError(f"{self.source}: {keys[0]}={value!r}; expected a positive number")
        return float(value)

    def negative(self, key: str, default: float) -> float:
        value = self.get(key, default=default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value < 0:
            raise ModelError(f"{self.source}: {key}={value!r}; expected a negative number")
        return float(value)

    def section(self, *keys: str) -> "Keys":
        """A nested object; empty when no key is given."""
        value = self.get(*keys, default={})
        if not isinstance(value, Mapping):
            raise ModelError(f"{self.source}: {keys[0]}={value!r}; expected a JSON object")
        return Keys(value, self.source)

    def over(self, other: "Keys", *keys: str) -> "Keys":
        """These keys, and of `other` those named that are not here."""
        more = {key: other.get(key) for key in keys if not self.has(key) and other.has(key)}
        return Keys({**self._raw, **more}, self.source)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default=default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.source}: {key}={value!r}; expected true or false")
        return value

    def indices(self, key: str, limit: int) -> list[int]:
        """A list of numbers below `limit`; empty when the key is missing."""
        value = self.get(key, default=[])
        if not isinstance(value, list) or not all(
            type(index) is int and 0 <= index < limit for index in value
        ):
            raise ModelError(
                f"{self.source}: {key}={value!r}; expected a list of numbers in 0..{limit - 1}"
            )
        return value

    def only(self, key: str, value: bool) -> None:
        """Refuse the other value of a flag; a missing key is what we support."""
        if self.flag(key, value) is not value:
            raise ModelError(
                f"{self.source}: {key}={str(not value).lower()} is not supported; expected "
                f"{str(value).lower()}"
            )

    def one_of(self, key: str, supported: tuple[str, ...], default: str) -> str:
        value = self.get(key, default=default)
        if value not in supported:
            raise ModelError(
                f"{self.source}: {key}={value!r} is not supported; expected one of "
                f"{', '.join(supported)}"
            )
        return str(value)

    def dt_limit(self) -> tuple[float, float]:
        """The explicit limit pair. `time_step_min`/`max` only steer initialisation and are not
        read."""
        limit = self.get("time_step_limit", "mamba_dt_limit", default=(0.0, math.inf))
        try:
            # transformers writes infinity as {"__float__": "Infinity"} or as the bare word.
            low, high = (
                float(bound["__float__"]) if isinstance(bound, Mapping) else float(bound)
                for bound in limit
            )
        except (TypeError, ValueError, KeyError, OverflowError):
            raise ModelError(
                f"{self.source}: time_step_limit={limit!r}; expected two numbers [low, high]"
            ) from None
        if not 0 <= low <= high:
            raise ModelError(f"{self.source}: time_step_limit={limit!r}; expected 0 <= low <= high")
        return low, high


def read_config_json(path: str | Path) -> dict[str, Any]:
    """Return config.json of a model folder (or of the file itself); raises ModelError."""
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        raw = json.loads(file.read_text())
    except FileNotFoundError:
        raise ModelError(
            f"{file} does not exist; expected a local HF model folder with config.json"
        ) from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: coding, syntax, digits
        raise ModelError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{file} holds {type(raw).__name__}; expected a JSON object")
    return raw
