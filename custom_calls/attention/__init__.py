"""Attention over a paged latent cache, in the two forms of multi-head latent attention."""

from custom_calls.attention.reference import mla_decode, mla_prefill


__all__ = ["mla_decode", "mla_prefill"]
