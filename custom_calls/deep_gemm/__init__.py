"""DeepGEMM's kernels (github.com/deepseek-ai/DeepGEMM) inside XLA programs, without PyTorch.

A kernel is a template of the headers in the package `sgl-deep-gemm`, instantiated for one shape and
tile and compiled to a cubin from when a program is traced; the C++ handler of `csrc/deep_gemm.cc`
launches it. The headers are read, the package is never imported. Which op uses which kernel is in
`grouped_gemm/deep_gemm.py` and `gemm/deep_gemm.py`.
"""

from custom_calls.deep_gemm.compiler import wait as wait
from custom_calls.deep_gemm.library import host_nanoseconds as host_nanoseconds
from custom_calls.deep_gemm.library import launches as launches
from custom_calls.deep_gemm.library import missing as missing
