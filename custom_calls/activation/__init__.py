"""The gate of a gated feed-forward network, on grouped tokens."""

from custom_calls.activation.api import silu_and_mul as silu_and_mul
