"""Expert-parallel dispatch and combine with DeepEP's semantics."""

from custom_calls.ep import deep_ep, loopback, reference
from custom_calls.ep.api import Dispatcher as Dispatcher
from custom_calls.ep.api import DispatchOutput as DispatchOutput


NORMAL = {"reference": reference.Normal, "loopback": loopback.Normal, "deepep": deep_ep.Normal}
"""The dispatchers of normal mode by backend. Each is made of an `Exchange`'s fields."""

LOW_LATENCY = {
    "reference": reference.LowLatency,
    "loopback": loopback.LowLatency,
    "deepep": deep_ep.LowLatency,
}
"""The dispatchers of low-latency mode by backend."""
