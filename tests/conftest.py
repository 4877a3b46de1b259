"""Every test runs on 8 virtual CPU devices with strict promotion, unless it is for a GPU."""

import jax


jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
