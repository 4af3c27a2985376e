"""Sizes of dtypes, alignment and human-readable quantities. Pure numbers, no torch."""

from tandem.errors import ConfigError

DTYPE_NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def dtype_nbytes(dtype: str) -> int:
    """Bytes of one element; raises ConfigError for a dtype that is not supported."""
    try:
        return DTYPE_NBYTES[dtype]
    except KeyError:
        supported = ", ".join(DTYPE_NBYTES)
        raise ConfigError(f"dtype={dtype!r} is not supported; use one of {supported}") from None


def align_up(value: int, alignment: int) -> int:
    """Smallest multiple of `alignment` that is at least `value`."""
    return -(-value // alignment) * alignment


def ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def format_nbytes(nbytes: int) -> str:
    """`49082368` -> `46.8 MiB`."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
