"""DeepEP's kernels out of the package sgl-deep-ep: finding them, and the memory they want."""
