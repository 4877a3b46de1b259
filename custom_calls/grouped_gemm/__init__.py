"""One matrix product for each group of tokens."""

from custom_calls.grouped_gemm.api import grouped_gemm as grouped_gemm
from custom_calls.grouped_gemm.api import row_alignment as row_alignment
