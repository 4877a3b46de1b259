"""The rules that keep the packages apart, read from the source with ast."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
PACKAGES = ("custom_calls", "jaxmoe", "serving")
MAY_IMPORT = {
    "custom_calls": {"custom_calls"},
    "jaxmoe": {"custom_calls", "jaxmoe"},
    "serving": {"custom_calls", "jaxmoe", "serving"},
}
VENDOR = {"torch", "deep_ep", "deep_gemm", "nixl", "triton"}
# Two places decide for the whole process: the command line's launch and the test configuration.
MAY_READ_ENVIRONMENT = {"serving/launch.py"}

FILES = sorted(
    path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py")
)


def imports(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports(path: Path) -> None:
    package = path.parts[0]
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    # Of NIXL there is a package for each version of CUDA.
    roots = {name.split(".")[0].removesuffix("_cu13") for name in imports(tree)}
    ours = roots & set(PACKAGES)
    assert ours <= MAY_IMPORT[package], f"{package} must not import {ours - MAY_IMPORT[package]}"
    for vendor in roots & (VENDOR | {"transformers"}):
        assert path.parts[:2] == ("jaxmoe", "reference") or path.stem == vendor, (
            f"{vendor} is imported outside jaxmoe/reference/ and {vendor}.py"
        )
    if package != "custom_calls":
        assert not any(name == "jax.ffi" for name in imports(tree))
        assert "jax.ffi" not in (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", FILES, ids=str)
def test_environment_is_read_in_one_place(path: Path) -> None:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    reads = [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    ]
    assert not reads or path.as_posix() in MAY_READ_ENVIRONMENT


def test_importing_touches_no_device() -> None:
    modules = [
        ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        for path in FILES
        if path.stem not in ("__main__", "make_tokenizer")
    ]
    script = "\n".join(
        [
            "import importlib",
            f"for name in {modules!r}: importlib.import_module(name)",
            "from jax._src import xla_bridge",
            "assert not xla_bridge._backends, 'a device was touched'",
        ]
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
