"""DeepSeek-V3-class mixture-of-experts models over expert-parallel devices.

Pure, jittable array programs and the files they are loaded from; no threads, sockets or clock.
The host side that serves requests lives in the package `serving`.
"""

__version__ = "0.1.0"
