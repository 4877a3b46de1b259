from collections.abc import Mapping

def registrations() -> Mapping[str, Mapping[str, object]]: ...
def missing() -> str: ...
def register_deep_gemm_kernel(
    id: int,
    cubin: bytes,
    *,
    is_fp8: bool,
    layout: int,
    num_groups: int,
    num_out: int,
    depth: int,
    block_m: int,
    block_n: int,
    swizzle_d: int,
    num_threads: int,
    shared_bytes: int,
    cluster_size: int,
    num_sms: int,
) -> None: ...
def announce_deep_gemm_kernel(id: int) -> None: ...
def fail_deep_gemm_kernel(id: int, error: str) -> None: ...
def deep_gemm_launches() -> Mapping[str, int]: ...
def deep_gemm_host_nanoseconds() -> int: ...
