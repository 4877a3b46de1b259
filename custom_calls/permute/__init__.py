"""Tokens to rows sorted by group, and back."""

from custom_calls.permute.api import permute_contiguous as permute_contiguous
from custom_calls.permute.api import permute_masked as permute_masked
from custom_calls.permute.api import unpermute as unpermute
