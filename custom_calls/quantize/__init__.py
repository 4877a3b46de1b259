"""From bfloat16 or float32 to FP8 with scales, and the gate of a feed-forward network before it."""

from custom_calls.quantize.api import quantize as quantize
from custom_calls.quantize.api import quantize_rows as quantize_rows
from custom_calls.quantize.api import silu_and_mul_quantize as silu_and_mul_quantize
