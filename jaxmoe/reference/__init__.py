"""Comparison with the PyTorch reference. The only package that may import torch."""
