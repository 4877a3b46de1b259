"""From a kernel's source to a cubin, kept on disk.

Cubins are named by a hash of the source, the compiler's flags and version, and the version of the
headers. Files appear by renaming, so any number of processes may share the directory; two that
need the same kernel at once both compile it, and either result is good.
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import jax
from tqdm import tqdm

from custom_calls.deep_gemm.kernel import Kernel


PACKAGE = "sgl-deep-gemm"
VERSIONS = ("0.2.5",)
"""Releases whose kernels have the parameters that the handler passes."""
FLAGS = (
    "-std=c++20",
    "-O3",
    "-gencode=arch=compute_90a,code=sm_90a",
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    "-diag-suppress=39,161,174,177,186,940",
    "-cubin",
)


class CompileError(RuntimeError):
    """A kernel did not compile; the message has the command and what it printed."""


@dataclasses.dataclass(frozen=True)
class Toolchain:
    nvcc: Path
    nvcc_version: str
    include: Path
    headers_version: str


@functools.cache
def find_toolchain() -> Toolchain | str:
    """The compiler and the headers, or why there are none."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        return "nvcc is not on the PATH (CUDA 12.4 or newer)"
    try:
        version = importlib.metadata.version(PACKAGE)
        # Found, not imported: the package's own extension wants a PyTorch of its own.
        package = importlib.util.find_spec("deep_gemm")
    except importlib.metadata.PackageNotFoundError:
        return f"the package {PACKAGE} is not installed (`make install-cuda`)"
    if version not in VERSIONS:
        return f"{PACKAGE} must be {' or '.join(VERSIONS)}, found {version}"
    if package is None or package.origin is None:
        return f"{PACKAGE} {version} has no module deep_gemm"
    include = Path(package.origin).parent / "include"
    if not (include / "deep_gemm/impls/sm90_fp8_gemm_1d2d.cuh").is_file():
        return f"{PACKAGE} {version} has no kernel headers in {include}"
    printed = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True)
    return Toolchain(Path(nvcc), printed.stdout, include, version)


def cache_dir() -> Path:
    """Beside XLA's own compiled programs where those are kept."""
    parent: str | None = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    return (Path(parent) if parent else Path.home() / ".cache" / "jaxmoe") / "deep_gemm"


def compile_kernel(kernel: Kernel) -> bytes:
    """The cubin, from the cache if it is there.

    Raises RuntimeError without a compiler or headers, CompileError when the compiler fails.
    """
    toolchain = find_toolchain()
    if isinstance(toolchain, str):
        raise RuntimeError(toolchain)
    identity = (kernel.source, FLAGS, toolchain.nvcc_version, toolchain.headers_version)
    name = hashlib.sha256(repr(identity).encode()).hexdigest()[:32]
    cached = cache_dir() / f"{name}.cubin"
    try:
        return cached.read_bytes()
    except FileNotFoundError:
        pass
    cached.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=cached.parent) as scratch:
        source, cubin = Path(scratch) / "kernel.cu", Path(scratch) / "kernel.cubin"
        source.write_text(kernel.source, encoding="utf-8")
        command = [
            os.fspath(toolchain.nvcc),
            *FLAGS,
            "-I",
            os.fspath(toolchain.include),
            os.fspath(source),
            "-o",
            os.fspath(cubin),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise CompileError(
                f"{kernel} did not compile\n$ {' '.join(command)}\n{kernel.source}\n"
                f"{done.stdout}{done.stderr}"
            )
        data = cubin.read_bytes()
        os.replace(cubin, cached)
    return data


_kernels: dict[int, concurrent.futures.Future[None]] = {}
_lock = threading.Lock()


def request(kernel: Kernel) -> None:
    """Have a kernel compiled and loaded in the background.

    Compiling a program that launches it waits for it, so the kernels of a program are compiled
    side by side once it is traced. One that failed is tried again.
    """
    from custom_calls.deep_gemm import library

    with _lock:
        known = _kernels.get(kernel.id)
        if known is None or (known.done() and known.exception() is not None):
            library.announce(kernel)
            _kernels[kernel.id] = _pool().submit(_load, kernel)


def wait(*, progress: bool = False) -> None:
    """Return when all requested kernels are loaded; with `progress` a line on stderr counts them.

    Raises the error of one that failed, after all have ended.
    """
    with _lock:
        pending = [kernel for kernel in _kernels.values() if not kernel.done()]
    with tqdm(
        total=len(pending), desc="DeepGEMM kernels", disable=not (progress and pending)
    ) as bar:
        for _ in concurrent.futures.as_completed(pending):
            bar.update()
    for kernel in pending:
        kernel.result()


@functools.cache
def _pool() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="deep_gemm")


def _load(kernel: Kernel) -> None:
    from custom_calls.deep_gemm import library

    try:
        library.register(kernel, compile_kernel(kernel))
    except BaseException as error:
        library.fail(kernel, str(error))
        raise
