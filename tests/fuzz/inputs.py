"""What the fuzz tests feed: valid messages, mutated as bytes and as trees of values, and garbage.

`TANDEM_FUZZ=100000 scripts/test tests/fuzz` runs about that many inputs in all; without the
variable it is a small share of them.
"""

import copy
import os
import random
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

TOTAL = int(os.environ.get("TANDEM_FUZZ", "2000"))

EVIL_INTS = (-(2**63), -(2**31), -1, 0, 1, 7, 2**16, 2**31 - 1, 2**31, 2**32, 2**53, 2**62)
EVIL_INTS += (2**63 - 1, 2**63, 2**64 - 4096, 2**64 - 1)
_EVIL = (*EVIL_INTS, None, True, "", "x" * 5000, "\x00\ud7ff", b"", b"\xff" * 64, [], {}, [[]])
_EVIL_FLOATS = (0.0, -1.0, 1e308, float("inf"), float("-inf"), float("nan"))

# One input is one seed: whatever fails is found again from it.
seeds = st.integers(0, 2**64 - 1)


def share(part: float) -> settings:
    """Settings of a test that runs `part` of all inputs."""
    return settings(
        max_examples=max(20, round(TOTAL * part)),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def mutated_bytes(rng: random.Random, raw: bytes) -> bytes:
    """A few bits, pieces or lengths changed; sometimes plain garbage."""
    kind = rng.randrange(8)
    if kind == 0:
        return rng.randbytes(rng.choice((0, 1, 2, 9, 64, 400)))
    found = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(found) + 1)
        match rng.randrange(6):
            case 0 if at < len(found):
                found[at] ^= 1 << rng.randrange(8)
            case 1:
                del found[at : at + rng.randint(1, 20)]
            case 2:
                found[at:at] = rng.randbytes(rng.randint(1, 9))
            case 3:
                found[at:at] = found[max(0, at - 30) : at]
            case 4:
                # msgpack's and JSON's ways to announce or to nest without end
                found[at:at] = rng.choice(
                    (b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 600, b"[" * 600)
                )
            case _:
                del found[at:]
    return bytes(found)


def mutated_tree(rng: random.Random, tree: Any) -> Any:
    """A copy in which one to three values, at any depth, are others."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = _places(tree)
        if not places:
            break
        holder, key = rng.choice(places)
        value = holder[key]
        choice = rng.randrange(8)
        if choice == 0 and isinstance(value, list) and value:
            holder[key] = value * rng.choice((2, 3, 40))
        elif choice == 1 and isinstance(value, list) and value:
            holder[key] = rng.sample(value, rng.randrange(len(value)))
        elif choice == 2:
            del holder[key]
        elif choice == 3:
            holder[key] = rng.choice(_EVIL)
        elif isinstance(value, float):
            holder[key] = rng.choice(_EVIL_FLOATS)
        elif isinstance(value, int) and choice < 6:
            holder[key] = rng.choice(EVIL_INTS)
        elif isinstance(value, int):
            holder[key] = value + rng.choice((-1, 1, value, 256, -256))
        else:
            holder[key] = rng.choice(_EVIL)
    return tree


def _places(tree: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    if isinstance(tree, dict):
        found += [(tree, key) for key in tree]
        inner = list(tree.values())
    elif isinstance(tree, list):
        found += [(tree, index) for index in range(len(tree))]
        inner = tree
    else:
        return found
    for value in inner:
        found += _places(value)
    return found
