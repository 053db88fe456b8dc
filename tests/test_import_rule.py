"""Do imports point one way, and does importing the library load only what it needs?"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("pallas_kernels", "helios_jax", "checkpoints_conv")
# Units of helios_jax (a package or a module), lowest first. One may import itself and those before
# its own line. "" is helios_jax/__init__.py, whose lazy attributes reach everything up to llm.
ORDER = (
    ("config",),
    ("sampling", "tokenizer", "quant", "hub"),
    ("cache",),
    ("scheduler", "profiler"),
    ("plots",),
    ("model",),
    ("speculative",),
    ("generation", "outputs"),
    ("engine",),
    ("speculative_config",),
    ("llm",),
    ("",),
    ("calibrate", "replay", "server"),
    ("distill",),
    ("bench",),
    ("evidence",),
    ("cli",),
)
# What the server may know of: it decides nothing about memory, order or tokens.
SERVER_KNOWS = ("", "engine", "llm", "outputs", "config", "server")
RANKS = {unit: rank for rank, units in enumerate(ORDER) for unit in units}
# Where checkpoints are opened and converted, inside the functions that do so.
OPENS_CHECKPOINTS = ("hub", "speculative_config", "llm", "calibrate", "distill", "bench", "cli")


class Import(NamedTuple):
    """module: what is imported, dotted; in_function: whether only a call imports it."""

    module: str
    line: int
    in_function: bool
    only_types: bool


def imports_of(tree: ast.Module, package: str) -> Iterator[Import]:
    """All imports of a module of `package` (dotted); `from a import b` gives a.b."""

    def walk(node: ast.AST, in_function: bool, only_types: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, in_function, only_types)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", node.lineno, in_function, only_types)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                yield from walk(child, in_function, True)
            for child in node.orelse:
                yield from walk(child, in_function, only_types)
        else:
            inside = in_function or isinstance(
                node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
            )
            for child in ast.iter_child_nodes(node):
                yield from walk(child, inside, only_types)

    yield from walk(tree, False, False)


def unit_of(module: str) -> str:
    """The unit that helios_jax.<…> belongs to; names that are no unit are attributes of ""."""
    _, _, rest = module.partition(".")
    unit = rest.split(".")[0]
    return unit if unit in RANKS else ""


def violations(root: Path) -> list[str]:
    """Every import under `root` that breaks the rule, as "path:line: what"."""
    found = []
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            name = path.relative_to(root)
            parts = name.with_suffix("").parts
            unit = "" if len(parts) == 2 and parts[1] == "__init__" else parts[1]
            if package == "helios_jax" and unit not in RANKS:
                found.append(f"{name}:1: the unit {unit!r} has no place in ORDER; give it one")
                continue
            for imported in imports_of(ast.parse(path.read_text()), ".".join(parts[:-1])):
                if problem := problem_of(package, unit, imported):
                    found.append(f"{name}:{imported.line}: {problem}")
    return found


def problem_of(package: str, unit: str, imported: Import) -> str | None:
    """What is wrong with an import in helios_jax.`unit`, or in another package; None if nothing."""
    top = imported.module.split(".")[0]
    what = f"imports {imported.module}"
    if package == "pallas_kernels":
        # A benchmark may bring in what it measures beside the kernels, where it does so.
        allowed = top in ("jax", "numpy", package) or top in sys.stdlib_module_names
        allowed |= unit == "bench" and top == "torch" and imported.in_function
        return None if allowed else f"{what}; kernels import jax and numpy only"
    if top == "flax" and (package, unit) != ("helios_jax", "model"):
        return f"{what}; only helios_jax.model does"
    if package != "helios_jax":
        return None
    if top == "checkpoints_conv":
        if unit not in OPENS_CHECKPOINTS:
            return f"{what}; only {OPENS_CHECKPOINTS} do"
        # The name of a type loads nothing.
        is_late = imported.in_function or imported.only_types
        return None if is_late else f"{what} outside a function"
    if unit == "" and imported.only_types:
        return None
    if top == "helios_jax":
        other = unit_of(imported.module)
        if other != unit and RANKS[other] >= RANKS[unit]:
            return f"{what}; {unit or 'helios_jax'} lies below {other or 'helios_jax itself'}"
        if unit == "server" and other not in SERVER_KNOWS:
            return f"{what}; the server knows of the engine and llm only"
        return None
    is_stdlib = top in sys.stdlib_module_names
    if unit == "hub" and not is_stdlib and not imported.in_function:
        return f"{what} outside a function; hub is loaded by commands that need no model"
    return None


def test_the_project_keeps_the_rule():
    assert not violations(ROOT)
    assert sum(1 for package in PACKAGES for _ in (ROOT / package).rglob("*.py")) > 50


@pytest.mark.parametrize(
    "path, source, problem",
    [
        ("pallas_kernels/ops/a.py", "from helios_jax.quant import expand", "kernels import jax"),
        ("pallas_kernels/a.py", "def f():\n    import flax", "kernels import jax"),
        ("pallas_kernels/bench/a.py", "import torch", "kernels import jax"),
        ("helios_jax/engine/step.py", "import flax.linen as nn", "only helios_jax.model does"),
        ("checkpoints_conv/a.py", "from flax import linen", "only helios_jax.model does"),
        ("helios_jax/config.py", "from helios_jax.quant import expand", "config lies below quant"),
        ("helios_jax/quant/a.py", "from helios_jax import sampling", "quant lies below sampling"),
        ("helios_jax/cache/a.py", "from ..model import rope", "cache lies below model"),
        ("helios_jax/model/a.py", "def f():\n    import helios_jax.llm", "model lies below llm"),
        ("helios_jax/llm.py", "import helios_jax", "llm lies below helios_jax itself"),
        ("helios_jax/llm.py", "from helios_jax import generate", "llm lies below helios_jax its"),
        ("helios_jax/llm.py", "from helios_jax.server import run", "llm lies below server"),
        ("helios_jax/replay/a.py", "import helios_jax.server.app", "replay lies below server"),
        ("helios_jax/server/a.py", "import helios_jax.scheduler", "the server knows of the"),
        ("helios_jax/server/a.py", "from helios_jax.cache import paged", "the server knows of"),
        ("helios_jax/server/a.py", "def f():\n    import helios_jax.model", "the server knows of"),
        ("helios_jax/server/a.py", "from ..sampling import SamplingParams", "the server knows of"),
        ("helios_jax/__init__.py", "from helios_jax.bench import run", "lies below bench"),
        ("helios_jax/llm.py", "import checkpoints_conv", "outside a function"),
        ("helios_jax/model/a.py", "def f():\n    import checkpoints_conv", "only ('hub'"),
        ("helios_jax/hub/a.py", "import jax", "hub is loaded by commands"),
        ("helios_jax/hub/a.py", "class A:\n    from tqdm import tqdm", "hub is loaded by commands"),
        ("helios_jax/hub/a.py", "def f():\n    from helios_jax.llm import load", "hub lies below"),
        ("helios_jax/gateway.py", "", "'gateway' has no place in ORDER"),
        ("helios_jax/model/a.py", "if True:\n    from helios_jax import llm", "model lies below"),
        ("helios_jax/model/a.py", "if TYPE_CHECKING:\n    import helios_jax.llm", "model lies bel"),
    ],
)
def test_the_checker_finds(path, source, problem, tmp_path):
    (found,) = violations(tree(tmp_path, path, source))
    assert found.startswith(f"{path}:") and problem in found


@pytest.mark.parametrize(
    "path, source",
    [
        (
            "pallas_kernels/ops/a.py",
            "import math, numpy as np\nfrom jax.experimental import x",
        ),
        ("pallas_kernels/bench/a.py", "def f():\n    import torch"),
        ("helios_jax/model/a.py", "import flax.linen\nfrom helios_jax.cache import NoCache"),
        ("helios_jax/model/a.py", "from . import rope\nfrom ..cache import dense"),
        ("helios_jax/cli/a.py", "def f():\n    import helios_jax, checkpoints_conv"),
        ("helios_jax/cli/a.py", "def f():\n    from helios_jax.server import run"),
        ("helios_jax/llm.py", "if TYPE_CHECKING:\n    from checkpoints_conv import Checkpoint"),
        ("helios_jax/hub/a.py", "async def f():\n    import rich\n    import checkpoints_conv"),
        ("helios_jax/__init__.py", "if TYPE_CHECKING:\n    from helios_jax.bench import run"),
        ("checkpoints_conv/a.py", "from helios_jax.quant import QuantTensor\nimport orbax"),
        ("helios_jax/server/a.py", "from helios_jax import SamplingParams, engine\nimport grpc"),
    ],
)
def test_the_checker_accepts(path, source, tmp_path):
    assert violations(tree(tmp_path, path, source)) == []


def tree(root: Path, path: str, source: str) -> Path:
    (root / path).parent.mkdir(parents=True)
    (root / path).write_text(source)
    return root


@pytest.mark.parametrize(
    "statement, absent",
    [
        ("import helios_jax", ("jax", "numpy", "flax", "checkpoints_conv", "rich", "typer")),
        ("import helios_jax; helios_jax.SamplingParams(temperature=0)", ("flax", "typer")),
        ("import helios_jax.hub", ("jax", "numpy", "huggingface_hub", "checkpoints_conv")),
        ("import helios_jax; helios_jax.generate; helios_jax.param_shardings", ("tokenizers",)),
        ("import helios_jax.llm", ("checkpoints_conv", "typer")),
        ("import helios_jax.bench", ("jax", "flax")),
        ("import helios_jax.server", ("jax", "numpy", "typer")),
        ("import pallas_kernels, pallas_kernels.packing", ("helios_jax", "flax")),
    ],
)
def test_importing_loads_no_more(statement, absent):
    """And never the server, the trainer, checkpoints' writers or plots."""
    never = ("optax", "orbax", "grpc", "matplotlib", "torch", "transformers")
    if "server" not in statement:
        never = (*never, "helios_jax.server")
    code = f"{statement}\nimport sys\nprint(*[m for m in {absent + never} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


@pytest.mark.parametrize(
    "module", ["llm", "calibrate", "distill", "distill.overlap", "distill.pairing_experiment"]
)
def test_importing_begins_no_backend(module):
    """A program may still choose its platform, and set its devices up, after the import."""
    done = subprocess.run(
        [sys.executable, "-c", f"import helios_jax.{module}"], cwd=ROOT, capture_output=True,
        text=True, timeout=120, env=os.environ | {"JAX_PLATFORMS": "none_such"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_client_needs_no_model():
    code = (
        "import helios_jax.server.client, sys\n"
        "print(*[m for m in ('jax', 'flax', 'numpy', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
