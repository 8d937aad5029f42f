"""The shape of the code: who imports whom, and that importing does nothing."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import qkv

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"qkv": ROOT / "qkv", "qkv_eval": ROOT / "eval"}

# A module imports only from groups above its own, or from its own.
ORDER = (
    ("qkv.presets", "qkv.config", "qkv.native", "qkv.large_pages"),
    ("qkv.formats", "qkv.transform", "qkv.rotary", "qkv.equalizer"),
    ("qkv.planes", "qkv.head_scale", "qkv.storage", "qkv.stored", "qkv.scales", "qkv.view", "qkv.sinks"),
    ("qkv.room", "qkv.spill", "qkv.host_spill"),
    ("qkv.attention", "qkv.lazy", "qkv.graph"),
    ("qkv.layers", "qkv.turning", "qkv.window", "qkv.limits", "qkv.saved", "qkv.cache"),
    ("qkv.hf",),
    ("qkv",),
    ("qkv.models", "qkv.named_caches", "qkv.shapes", "qkv.model_shape", "qkv.plan", "qkv.plan_rows"),
    ("qkv.cli",),
    ("qkv_eval",),
)
WITHOUT_TRANSFORMERS = (
    "qkv.presets",
    "qkv.config",
    "qkv.native",
    "qkv.large_pages",
    "qkv.formats",
    "qkv.transform",
    "qkv.rotary",
    "qkv.equalizer",
    "qkv.planes",
    "qkv.head_scale",
    "qkv.storage",
    "qkv.stored",
    "qkv.view",
    "qkv.sinks",
    "qkv.room",
    "qkv.spill",
    "qkv.host_spill",
    "qkv.attention",
    "qkv.lazy",
    "qkv.graph",
)


@dataclass(frozen=True)
class Import:
    """One import: the module that has it, what it imports, and whether it runs when the module is loaded."""

    importer: str
    module: str
    name: str | None
    at_load: bool


def modules() -> dict[str, Path]:
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return found


def imports_of(name: str, path: Path) -> Iterator[Import]:
    def visit(node: ast.AST, at_load: bool) -> Iterator[Import]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(name, alias.name, None, at_load)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: write imports in full"
            for alias in node.names:
                yield Import(name, str(node.module), alias.name, at_load)
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_load and not is_function)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), True)


ALL_IMPORTS = [found for name, path in modules().items() for found in imports_of(name, path)]


def group_of(module: str) -> int:
    """The place in `ORDER` of the longest name that is `module` or a package around it."""
    matches = [
        (len(name), place) for place, names in enumerate(ORDER) for name in names if f"{module}.".startswith(f"{name}.")
    ]
    return max(matches)[1]


def test_every_module_has_its_place_in_the_order() -> None:
    named = {name for names in ORDER for name in names}
    for module in modules():
        top = ".".join(module.split(".")[:2]) if module.startswith("qkv.") else module.split(".")[0]
        assert top in named, f"give {top} its place in ORDER"


def test_imports_follow_the_order() -> None:
    for found in ALL_IMPORTS:
        if found.module.split(".")[0] not in PACKAGES or not found.at_load:
            continue
        imported = f"{found.module}.{found.name}" if f"{found.module}.{found.name}" in modules() else found.module
        if found.importer == "qkv" or imported == found.importer:
            continue
        assert group_of(imported) <= group_of(found.importer), f"{found.importer} imports {imported}"


def test_only_the_upper_layers_know_transformers() -> None:
    for found in ALL_IMPORTS:
        if found.module.split(".")[0] == "transformers":
            assert not any(f"{found.importer}.".startswith(f"{name}.") for name in WITHOUT_TRANSFORMERS), found


def test_triton_is_imported_only_in_its_own_files_and_on_first_use() -> None:
    for found in ALL_IMPORTS:
        if found.module.split(".")[0] == "triton":
            assert found.importer.split(".")[-1].startswith("triton_"), found
        if ".triton_" in found.module:
            assert not found.at_load, found


def test_the_library_does_not_know_its_evaluation() -> None:
    assert not [found for found in ALL_IMPORTS if found.importer.split(".")[0] == "qkv" and "qkv_eval" in found.module]


def test_the_evaluation_uses_public_names_only() -> None:
    for found in ALL_IMPORTS:
        if found.importer.split(".")[0] != "qkv_eval" or found.module.split(".")[0] != "qkv":
            continue
        assert not any(part.startswith("_") for part in f"{found.module}.{found.name}".split(".")), found
        public = ("qkv", "qkv.attention", "qkv.large_pages", "qkv.models", "qkv.named_caches", "qkv.scales")
        assert found.module in public or "qkv.cli" in found.module, found
    for name, path in modules().items():
        if name.split(".")[0] == "qkv_eval":
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "qkv":
                    assert node.attr in qkv.__all__, f"{name} uses qkv.{node.attr}"


def test_commands_load_without_torch() -> None:
    for found in ALL_IMPORTS:
        if "qkv.cli" in found.importer or found.importer == "qkv_eval.commands":
            assert not (found.at_load and found.module.split(".")[0] in ("torch", "transformers")), found


def test_every_package_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {name for name, path in modules().items() if path.name == "__init__.py"}
    assert set(project["tool"]["setuptools"]["packages"]) == packages


IMPORT_QKV = """
import json, sys, time, warnings
import torch, transformers
import transformers.cache_utils, transformers.masking_utils, transformers.modeling_utils
from transformers.integrations import sdpa_attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as masks
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as attentions
before = set(attentions.valid_keys()), set(masks.valid_keys())
loaded = set(sys.modules)
warnings.simplefilter("error")
begin = time.perf_counter()
import qkv
qkv.QKVCache, qkv.enable
seconds = time.perf_counter() - begin
after = set(attentions.valid_keys()), set(masks.valid_keys())
maps = open("/proc/self/maps").read() if sys.platform == "linux" else ""
print(json.dumps({
    "seconds": seconds,
    "registered": before != after,
    "new": sorted(set(sys.modules) - loaded),
    "kernels": "_kernels" in maps,
}))
"""


@pytest.fixture(scope="module")
def fresh_import() -> dict[str, object]:
    """What `import qkv` does in a fresh interpreter that already has torch and transformers."""
    done = subprocess.run([sys.executable, "-c", IMPORT_QKV], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_importing_registers_nothing_and_loads_no_kernels(fresh_import: dict[str, object]) -> None:
    assert not fresh_import["registered"]
    assert not fresh_import["kernels"]


def test_importing_loads_no_other_package(fresh_import: dict[str, object]) -> None:
    new = fresh_import["new"]
    assert isinstance(new, list)
    tops = {name.split(".")[0] for name in new}
    assert not tops & {"triton", "qkv_eval", "typer", "rich", "gguf", "datasets", "lm_eval", "hqq", "optimum"}


def test_importing_takes_less_than_a_second(fresh_import: dict[str, object]) -> None:
    seconds = fresh_import["seconds"]
    assert isinstance(seconds, float)
    assert seconds < 1.0
