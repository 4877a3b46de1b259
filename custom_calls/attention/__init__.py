"""Attention over a paged latent cache, in the two forms of multi-head latent attention."""

from custom_calls.attention.api import mla_decode as mla_decode
from custom_calls.attention.api import mla_prefill as mla_prefill
