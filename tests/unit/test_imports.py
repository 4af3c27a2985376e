"""The import table of the package: who may import whom, and what stays free of torch."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import tandem

ROOT = Path(tandem.__file__).parent

# Imports go down only. Each package may import those named here, and whatever these may import.
BELOW = {
    "cli": ("bench",),
    "bench": ("launch",),
    "launch": ("router", "server"),
    "router": ("server",),
    "server": ("engine",),
    "engine": ("runner", "scheduler"),
    "runner": ("models", "scheduler"),
    "models": ("layers",),
    "layers": ("ops", "state"),
    "ops": ("errors", "log", "units"),
    "scheduler": ("cache", "transfer"),
    "cache": ("state",),
    "transfer": ("state",),
    "state": ("config",),
    "config": ("errors", "log", "units"),
    "units": ("errors",),
    "log": (),
    "errors": (),
}

TORCH_FREE = ("errors", "log", "units", "config", "state", "cache", "scheduler", "server", "router")

# Each is imported in a fresh process. The router and the HTTP process must start fast and small.
TORCH_FREE_MODULES = (
    "tandem",
    "tandem.cli",
    "tandem.models.registry",
    "tandem.models.table",
    "tandem.router.app",
    "tandem.server.app",
    "tandem.engine.client",
    "tandem.engine.messages",
    "tandem.engine.outputs",
    "tandem.scheduler.scheduler",
    "tandem.transfer.plan",
    "tandem.transfer.protocol",
)


def allowed(package: str) -> set[str]:
    below = set(BELOW[package])
    for lower in BELOW[package]:
        below |= allowed(lower)
    return below


def package_of(module: str) -> str:
    """`tandem.a.b` -> `a`. Names that the package exports (LLM) come from the engine."""
    name = module.split(".")[1]
    return name if name in BELOW else "engine"


@cache
def imports_of(path: Path) -> tuple[tuple[int, str], ...]:
    """(line, module) of every import of a file, those inside functions and type checks included."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            module = node.module or ""
            # `from tandem import ops` names a package, `from tandem import LLM` a lazy export.
            names = [f"tandem.{item.name}" for item in node.names] if module == "tandem" else []
            found += [(node.lineno, name) for name in names or [module]]
    return tuple(found)


def files() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def own_package(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def test_the_table_has_every_package_and_no_cycle():
    assert {own_package(path) for path in files()} <= set(BELOW)
    for package in BELOW:
        assert package not in allowed(package)
    assert "transfer" not in allowed("cache")
    assert "cache" not in allowed("transfer")


def test_imports_go_down_only():
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {own_package(path)} imports {module}"
        for path in files()
        for line, module in imports_of(path)
        if module.startswith("tandem.")
        and package_of(module) not in {*allowed(own_package(path)), own_package(path)}
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("library", ["torch", "triton"])
def test_packages_without_torch_never_name_it(library):
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files()
        if own_package(path) in TORCH_FREE
        for line, module in imports_of(path)
        if module.split(".")[0] == library
    ]
    assert not wrong


def test_one_file_imports_nixl():
    found = {
        str(path.relative_to(ROOT))
        for path in files()
        for _, module in imports_of(path)
        if module.split(".")[0].startswith("nixl")
    }
    assert found <= {"transfer/agent_nixl.py"}


@pytest.mark.parametrize("module", TORCH_FREE_MODULES)
def test_importing_it_does_not_load_torch(module):
    code = (
        f"import sys, {module}\n"
        "print(*sorted({'torch', 'nixl', 'nixl_cu13', 'triton'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []


# Ways to run what was only meant to be read. `*_object*` are torch.distributed's pickled messages.
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}
UNSAFE_CALLS = re.compile(
    r"torch\.load|\.deserialize_descs|\.(?:all_gather|broadcast|gather|scatter|send|recv)_object"
    r"|allow_pickle=True|weights_only=False|yaml\.load|trust_remote_code=True|(?<![\w.])(?:eval|exec)\("
)


def test_nothing_is_unpickled_or_evaluated():
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {module}"
        for path in files()
        for line, module in imports_of(path)
        if module.split(".")[0] in UNSAFE_MODULES
    ]
    for path in files():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if UNSAFE_CALLS.search(line):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("line", "is_unsafe"),
    [
        ("state = torch.load(path)", True),
        ("dist.broadcast_object_list(found)", True),
        ("agent.deserialize_descs(raw)", True),
        ("value = eval(text)", True),
        ("model.eval()", False),
        ("native.load()", False),
    ],
)
def test_unsafe_calls_are_recognised(line, is_unsafe):
    assert bool(UNSAFE_CALLS.search(line)) is is_unsafe
