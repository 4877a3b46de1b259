"""Expert-parallel dispatch and combine with DeepEP's semantics."""

from custom_calls.ep.reference import (
    LowLatencyHandle,
    LowLatencyInFlight,
    NormalHandle,
    NormalInFlight,
    low_latency_combine_finish,
    low_latency_combine_start,
    low_latency_dispatch_finish,
    low_latency_dispatch_start,
    normal_combine_finish,
    normal_combine_start,
    normal_dispatch_finish,
    normal_dispatch_start,
)


__all__ = [
    "LowLatencyHandle",
    "LowLatencyInFlight",
    "NormalHandle",
    "NormalInFlight",
    "low_latency_combine_finish",
    "low_latency_combine_start",
    "low_latency_dispatch_finish",
    "low_latency_dispatch_start",
    "normal_combine_finish",
    "normal_combine_start",
    "normal_dispatch_finish",
    "normal_dispatch_start",
]
