"""Products of tokens with a matrix stored as in a Hugging Face checkpoint: [out, in]."""

from custom_calls.gemm.api import gemm as gemm
from custom_calls.gemm.api import gemm_by_head as gemm_by_head
from custom_calls.gemm.api import gemm_fp8 as gemm_fp8
