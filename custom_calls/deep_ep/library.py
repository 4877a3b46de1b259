"""DeepEP's launchers and the CUDA handlers that call them.

The package's extension is opened as a library, without PyTorch, NVSHMEM and NCCL: small libraries
of our own stand for them. A process that has opened it cannot import torch any more; one that has
imported torch before can open it.
"""

import functools
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jaxtyping import Array

from custom_calls.deep_ep import sizes
from custom_calls.varying import as_varying, shape_like, varying_axes


if TYPE_CHECKING:
    from custom_calls import _cuda
    from custom_calls.runtime import EpSpec

PACKAGE = "sgl-deep-ep"
VERSIONS = ("0.1.2.post1",)
"""Releases whose launchers have the parameters that the handlers pass."""
COMPUTE_CAPABILITY = "9.0"
CUDA_RUNTIME = "libcudart.so.13"


@functools.cache
def missing() -> str | None:
    """Why DeepEP cannot be used, or None when it can."""
    found = _open()
    return found if isinstance(found, str) else None


def check(spec: "EpSpec") -> None:
    """Raise ValueError for a group that the package has no kernels for, RuntimeError where there
    is no package."""
    library = _library()
    experts = spec.max_ep_size * spec.slots_per_rank
    if spec.itemsize != 2:
        raise ValueError(f"'deepep' moves bfloat16, got numbers of {spec.itemsize} bytes")
    if spec.low_latency_tokens:
        hidden, top_k = library.low_latency_hidden_sizes, library.low_latency_max_top_k
        if spec.hidden_size not in hidden:
            raise ValueError(
                f"low-latency dispatch of 'deepep' is compiled for hidden_size {hidden}, got "
                f"{spec.hidden_size}: choose --deepep-mode normal or another --moe-a2a-backend"
            )
        if spec.top_k > top_k:
            raise ValueError(f"low-latency dispatch takes at most {top_k} experts a token, got "
                             f"{spec.top_k}")  # fmt: skip
        sms = spec.low_latency_sms
        if experts < 2 or (sms is not None and sms < 2):
            raise ValueError(
                f"low-latency dispatch needs two slots and two multiprocessors at least, got "
                f"{experts} slots in all, low_latency_sms {sms}"
            )
        if sms is not None and experts > 14 * sms:
            raise ValueError(
                f"low-latency dispatch needs a multiprocessor for every 14 experts ({experts}), "
                f"got low_latency_sms {sms}"
            )
    if spec.normal_tokens:
        if spec.max_ep_size not in library.normal_num_ranks:
            raise ValueError(
                f"normal dispatch of 'deepep' is compiled for {library.normal_num_ranks} ranks, "
                f"got {spec.max_ep_size}: choose --deepep-mode low_latency or another "
                f"--moe-a2a-backend"
            )
        row = spec.hidden_size * 2
        if row % 32 or row // 2 + 8 > 8192:
            raise ValueError(
                f"normal dispatch of 'deepep' moves rows of a multiple of 32 bytes and at most "
                f"16368, hidden_size {spec.hidden_size} has {row}"
            )
        if spec.slots_per_rank > 128:
            raise ValueError(
                f"normal dispatch of 'deepep' takes at most 128 slots a rank, got "
                f"{spec.slots_per_rank}"
            )
        if spec.normal_sms < 2 or spec.normal_sms % 2:
            raise ValueError(f"normal_sms must be even and positive, got {spec.normal_sms}")


def make_group(spec: "EpSpec", first_rank: int, devices: Sequence[int]) -> "_cuda.DeepEpGroup":
    """The memory of consecutive ranks on these local devices, not connected to others yet."""
    from custom_calls import _cuda

    ranks = spec.max_ep_size
    return _cuda.DeepEpGroup(
        _library(),
        num_ranks=ranks,
        num_experts=ranks * spec.slots_per_rank,
        hidden=spec.hidden_size,
        num_micro_batches=spec.num_micro_batches,
        low_latency_bytes=spec.low_latency_bytes,
        normal_bytes=spec.normal_bytes,
        low_latency_sms=spec.low_latency_sms or 0,
        normal_sms=spec.normal_sms,
        dispatch_send_tokens=sizes.DISPATCH_SEND_TOKENS.get(ranks, 0),
        combine_send_tokens=sizes.COMBINE_SEND_TOKENS.get(ranks, 0),
        receive_tokens=sizes.NORMAL_QUEUE_TOKENS,
        first_rank=first_rank,
        devices=devices,
    )


def call(
    name: str,
    results: Sequence[jax.ShapeDtypeStruct],
    *operands: Array,
    aliases: dict[int, int] | None = None,
    **attributes: Any,
) -> tuple[Array, ...]:
    """Calls a handler; usable inside `shard_map`. `aliases`: operands that a result replaces."""
    axes = varying_axes(*operands)
    outputs = jax.ffi.ffi_call(
        f"jaxmoe_cuda_deep_ep_{name}",
        tuple(shape_like(result.shape, result.dtype, *operands) for result in results),
        vmap_method="sequential",
        has_side_effect=True,
        input_output_aliases=aliases,
    )(*(as_varying(operand, axes) for operand in operands), **attributes)
    return tuple(outputs)


def launches() -> dict[str, int]:
    """Kernels launched since the process started, by name.

    "captured" are those of them that recorded a command buffer; replays of it are not counted.
    """
    from custom_calls import _cuda

    return dict(_cuda.deep_ep_launches())


def stubs(module: Any) -> list[str]:
    """The libraries that stand for those that the launchers never call; they lie beside `_cuda`."""
    return sorted(str(path) for path in Path(module.__file__).parent.glob("deep_ep/stubs/*.so"))


def _library() -> "_cuda.DeepEpLibrary":
    found = _open()
    if isinstance(found, str):
        raise RuntimeError(f"'deepep' cannot run: {found}")
    return found


@functools.cache
def _open() -> "_cuda.DeepEpLibrary | str":
    """The package's launchers, or why there are none."""
    try:
        from custom_calls import _cuda
    except ImportError as error:
        return f"custom_calls._cuda is not built, CUDA's headers were not found ({error})"
    for device in jax.local_devices():
        capability = getattr(device, "compute_capability", None)
        if capability != COMPUTE_CAPABILITY:
            return f"the kernels are for compute capability 9.0, {device} has {capability}"
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return f"the package {PACKAGE} is not installed (`make install-cuda`)"
    if distribution.version not in VERSIONS:
        return f"{PACKAGE} must be {' or '.join(VERSIONS)}, found {distribution.version}"
    extensions = [
        Path(str(distribution.locate_file(file)))
        for file in distribution.files or []
        if file.name.startswith("_C.") and file.suffix == ".so"
    ]
    if len(extensions) != 1 or not extensions[0].is_file():
        return f"{PACKAGE} {distribution.version} has no extension module"
    reasons = []
    for cuda_runtime in _cuda_runtimes():
        try:
            library = _cuda.DeepEpLibrary(
                extension=str(extensions[0]),
                cuda_runtime=cuda_runtime,
                stubs=stubs(_cuda),
            )
        except RuntimeError as error:
            reasons.append(str(error))
            continue
        for target, handler in _cuda.deep_ep_registrations().items():
            jax.ffi.register_ffi_target(target, handler, platform="CUDA")
        return library
    return "; ".join(reasons)


def _cuda_runtimes() -> list[str]:
    """Where the CUDA runtime may be: loaded already or found by the loader, or in a package."""
    paths = [CUDA_RUNTIME]
    for name in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13"):
        try:
            files = importlib.metadata.distribution(name).files or []
        except importlib.metadata.PackageNotFoundError:
            continue
        paths += [str(file.locate()) for file in files if file.name == CUDA_RUNTIME]
    return paths
