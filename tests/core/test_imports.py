"""Imports go one way, the core needs no torch, and each of these checks can fail."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "functional_fsdp"
CORE, SHARDING = PACKAGE / "core", PACKAGE / "sharding"
LAYERS = (
    {"errors"},
    {"ids"},
    {"policy", "order", "effects"},
    {"spec"},
    {"state", "render"},
    {"draft"},
    {"gradients", "walks"},
    {"iteration"},
    {"transitions"},
)
"""Files of the core; each imports only from those above it, of its own layer none."""
SHARDING_SEES = {"functional_fsdp.core.errors", "functional_fsdp.core.ids"}
INTERPRETER_SEES = {"functional_fsdp.core.ids", "functional_fsdp.core.effects", "functional_fsdp.core.errors"}

REFUSE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError("torch is refused")
sys.meta_path.insert(0, Refuse())
"""


def imported(source: str) -> Iterator[str]:
    """Yield every module that a source imports, wherever the import stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "the package imports by full names"
            yield from (
                f"{node.module}.{alias.name}" if node.module == "functional_fsdp.core" else str(node.module)
                for alias in node.names
            )
        elif isinstance(node, ast.Name) and node.id in ("__import__", "exec", "eval"):
            yield node.id


def wrong_imports(name: str, source: str) -> list[str]:
    """Return the imports that a file of the core must not have."""
    layer = next(index for index, names in enumerate(LAYERS) if name in names)
    return not_allowed(source, {f"functional_fsdp.core.{below}" for names in LAYERS[:layer] for below in names})


def wrong_in_sharding(source: str) -> list[str]:
    """Return the imports that a file of `sharding` must not have: it sees the core's errors and names, and itself."""
    itself = {f"functional_fsdp.sharding.{path.stem}" for path in SHARDING.glob("*.py")}
    return not_allowed(source, SHARDING_SEES | itself)


def not_allowed(source: str, allowed: set[str]) -> list[str]:
    """Return the imports that are neither allowed nor of the standard library."""
    outside = (sys.stdlib_module_names | {"typing_extensions"}) - {"importlib"}
    return [module for module in imported(source) if module not in allowed and module.split(".")[0] not in outside]


def wrong_in_interpreter(source: str) -> list[str]:
    """Return what an interpreter imports of the core beyond names, effects and errors."""
    modules = imported(source)
    return [name for name in modules if name.startswith("functional_fsdp.core") and name not in INTERPRETER_SEES]


def core_files() -> list[Path]:
    """Return the files of the core but its `__init__`."""
    return sorted(path for path in CORE.glob("*.py") if path.stem != "__init__")


def test_every_file_of_the_core_has_a_layer() -> None:
    """A new file has to be placed."""
    names = [name for names in LAYERS for name in names]
    assert sorted(names) == [path.stem for path in core_files()]
    assert list(imported((CORE / "__init__.py").read_text())) == []


@pytest.mark.parametrize("path", core_files(), ids=lambda path: str(path.stem))
def test_core_imports_go_one_way(path: Path) -> None:
    """Only the standard library, typing_extensions, and files of layers above."""
    assert wrong_imports(path.stem, path.read_text()) == []


def test_the_check_of_imports_can_fail() -> None:
    """Torch, the runtime, a file below and a file beside are all wrong, wherever they stand."""
    for wrong in (
        "import torch",
        "from torch import Tensor",
        "import optree.pytree",
        "import numpy as np",
        "from functional_fsdp.runtime import interpreter",
        "from functional_fsdp.core.state import FsdpState",
        "from functional_fsdp.core.effects import Effect",
        "from functional_fsdp.core import state",
        "import importlib",
        "def late():\n    import torch",
        "__import__('torch')",
    ):
        assert wrong_imports("order", wrong), wrong
    assert not wrong_imports("order", "import bisect\nfrom typing_extensions import Self")
    assert not wrong_imports("order", "from functional_fsdp.core.ids import UnitId")


@pytest.mark.parametrize("path", sorted(SHARDING.glob("*.py")), ids=lambda path: str(path.stem))
def test_sharding_imports_names_errors_and_itself(path: Path) -> None:
    """Placements, layouts and strategies are as pure as the core."""
    assert wrong_in_sharding(path.read_text()) == []


def test_the_check_of_sharding_can_fail() -> None:
    """Torch, the runtime and the rest of the core are out of its sight."""
    assert wrong_in_sharding("import torch")
    assert wrong_in_sharding("def late():\n    from functional_fsdp.runtime import mesh")
    assert wrong_in_sharding("from functional_fsdp.core.spec import ModelSpec")
    assert not wrong_in_sharding("from functional_fsdp.core.errors import unexpected")
    assert not wrong_in_sharding("import math\nfrom functional_fsdp.sharding.layout import cut")


def test_the_core_stays_small() -> None:
    """Under 1,500 lines together, and under 400 a file."""
    lengths = {path.stem: len(path.read_text().splitlines()) for path in CORE.glob("*.py")}
    assert sum(lengths.values()) < 1500, lengths
    assert max(lengths.values()) < 400, lengths


def test_interpreter_sees_only_names_effects_and_errors() -> None:
    """What it cannot see it cannot decide."""
    assert wrong_in_interpreter((PACKAGE / "runtime" / "interpreter.py").read_text()) == []


def test_the_check_of_the_interpreter_can_fail() -> None:
    """The state and the policy are out of its sight."""
    assert wrong_in_interpreter("from functional_fsdp.core.state import FsdpState")
    assert wrong_in_interpreter("from functional_fsdp.core import policy")
    assert not wrong_in_interpreter("from functional_fsdp.core.effects import Effect\nimport torch")


def outside_of_runtime() -> list[Path]:
    """Return the files of the package that are not of the runtime."""
    return [path for path in sorted(PACKAGE.rglob("*.py")) if PACKAGE / "runtime" not in path.parents]


@pytest.mark.parametrize("path", outside_of_runtime(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_runtime_imports_communication(path: Path) -> None:
    """torch.distributed and torch.cuda belong to the runtime."""
    assert [name for name in imported(path.read_text()) if name.startswith(("torch.distributed", "torch.cuda"))] == []


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter at the root of the repository."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize(
    "module",
    ["functional_fsdp", "functional_fsdp.core.transitions", "functional_fsdp.core.render"]
    + [f"functional_fsdp.sharding.{name}" for name in ("layout", "placement", "strategy")]
    + [f"functional_fsdp.testing.{name}" for name in ("programs", "invariants", "table", "worlds", "search")],
)
def test_importing_does_not_import_torch(module: str) -> None:
    """Neither the package nor its pure parts."""
    finished = run(f"import sys, {module}; sys.exit('torch' in sys.modules)")
    assert finished.returncode == 0, finished.stderr


def test_the_check_for_torch_can_fail() -> None:
    """The runtime's names do import torch, and a refused import is seen."""
    assert run("import sys, functional_fsdp; functional_fsdp.fully_shard; sys.exit('torch' in sys.modules)").returncode
    finished = run(f"{REFUSE}\nimport torch")
    assert finished.returncode == 1 and "torch is refused" in finished.stderr


def test_core_tests_pass_where_importing_torch_raises() -> None:
    """Those of tests/sharding too; but this file, and what takes long and goes the same ways again."""
    args = ["tests/core", "tests/sharding", "-q", "-x", "-p", "no:cacheprovider"]
    args += [f"--ignore=tests/core/test_{name}.py" for name in ("imports", "cost", "faults", "search", "worlds")]
    args += ["--programs=20"]
    finished = run(f"{REFUSE}\nimport pytest; sys.exit(pytest.main({args!r}))")
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-1000:]
    assert " passed" in finished.stdout


def test_the_run_without_torch_can_fail(tmp_path: Path) -> None:
    """A test that imports torch fails there."""
    path = tmp_path / "test_planted.py"
    path.write_text("def test_planted():\n    import torch\n")
    args = [str(path), "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", "-c", "/dev/null"]
    finished = run(f"{REFUSE}\nimport pytest; sys.exit(pytest.main({args!r}))")
    assert finished.returncode == 1 and "torch is refused" in finished.stdout
