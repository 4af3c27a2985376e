"""Compiles the C++ of this folder into one shared library, once per source, compiler and CPU.

The result lies in a cache directory of the user under a name made of everything it depends on.
Concurrent builds are safe: each writes under a name of its own and renames at the end.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

from tandem.errors import ConfigError
from tandem.log import get_logger

log = get_logger(__name__)

_FOLDER = Path(__file__).parent
_FLAGS = (
    "-std=gnu++17",
    "-O3",
    "-fopenmp",
    "-fPIC",
    "-fvisibility=hidden",
    # exp, softplus and divisions set no errno and trap nothing here.
    "-fno-math-errno",
    "-fno-trapping-math",
    # No warnings: g++ 12 has hundreds of false ones inside its own intrinsics.
    "-w",
)


class NativeBuildError(ConfigError):
    """The native kernels could not be compiled; the message holds the compiler's words."""


def build_library(cache_dir: Path | None = None, march: str = "native") -> Path:
    """Path of the compiled library, compiled now if the cache does not hold it.

    Args:
        cache_dir: where libraries are kept; `default_cache_dir()` if None.
        march: the instruction set, as g++ names it.

    Raises: NativeBuildError when there is no compiler or it fails.
    """
    name = os.environ.get("CXX", "g++")
    compiler = shutil.which(name)
    if compiler is None:
        raise NativeBuildError(
            f"no C++ compiler: {name!r} is not on the PATH; install it or set CXX to another"
        )
    sources = sorted(_FOLDER.glob("*.cpp"))
    openmp = _loaded_openmp()
    key = _key([*sources, *sorted(_FOLDER.glob("*.h"))], compiler, openmp, march)
    folder = cache_dir or default_cache_dir()
    target = folder / f"kernels-{key}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    log.info("compiling native CPU kernels into %s", folder)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources]
        _run_all(
            [compiler, *_FLAGS, f"-march={march}", "-c", str(source), "-o", str(made)]
            for source, made in zip(sources, objects, strict=True)
        )
        linked = Path(scratch) / target.name
        # OpenMP is named as a file and not as -fopenmp: a second copy of it would bring a second
        # pool of threads, which spins against the framework's own.
        _run_all([[compiler, "-shared", *map(str, objects), openmp or "-lgomp", "-o", str(linked)]])
        os.replace(linked, target)
    return target


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/tandem, else ~/.cache/tandem."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "tandem"


def _loaded_openmp() -> str | None:
    """File of the OpenMP runtime that torch has loaded into this process."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    for line in maps.read_text().splitlines():
        name = line.rsplit("/", 1)[-1]
        if name.startswith("libgomp") and ".so" in name:
            return line[line.index("/") :]
    return None


def _key(files: list[Path], compiler: str, openmp: str | None, march: str) -> str:
    """Hash of all that decides the bytes of the library or whether this CPU can run it."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    parts = [file.read_bytes() for file in files]
    parts += [compiler.encode(), version, " ".join(_FLAGS).encode(), march.encode()]
    parts += [str(openmp).encode(), torch.__version__.encode(), _cpu_flags().encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


def _cpu_flags() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("flags"):
                return line
    return platform.processor()


def _run_all(commands: Iterable[list[str]]) -> None:
    """Run commands side by side; raises NativeBuildError with the words of one that fails."""
    started = [
        (command, subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        for command in commands
    ]
    results = [(command, process.communicate()[1], process) for command, process in started]
    for command, words, process in results:
        if process.returncode != 0:
            raise NativeBuildError(
                f"{command[0]} ended with {process.returncode}: {words.strip()[-2000:]}; "
                "set TANDEM_NATIVE=0 to run without native kernels"
            )
