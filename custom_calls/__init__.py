"""Array functions: foreign kernels as pure JAX functions, each beside its plain-JAX reference.

Every op is a folder: `api.py` is what callers import, `reference.py` says in plain JAX what the op
means, and each further file is one backend. Nothing here knows a model, and importing this package
touches no device.
"""
