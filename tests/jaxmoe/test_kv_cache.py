import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe import kv_cache, sharding
from jaxmoe.checkpoint import RANDOM_CONFIGS
from jaxmoe.compilations import CompilationCounter
from jaxmoe.config import ModelConfig


CONFIG = ModelConfig.from_hf(RANDOM_CONFIGS["tiny"])


def test_write_touches_only_its_slots():
    pool = jnp.arange(4 * 3 * 2, dtype=jnp.float32).reshape(4, 3, 2)
    got = kv_cache.write(pool, jnp.asarray([[-1.0, -2.0], [-3.0, -4.0]]), jnp.asarray([4, 11]))
    want = np.array(pool).reshape(12, 2)
    want[4], want[11] = [-1, -2], [-3, -4]
    np.testing.assert_array_equal(got, want.reshape(4, 3, 2))


def test_a_second_cache_compiles_nothing():
    mesh = sharding.make_mesh(2)
    kv_cache.allocate(CONFIG, mesh, num_pages=3, page_size=4, dtype=jnp.float32)
    counter = CompilationCounter()
    cache = kv_cache.allocate(CONFIG, mesh, num_pages=3, page_size=4, dtype=jnp.float32)
    assert counter.count == 0
    assert (cache.num_pages, cache.page_size) == (3, 4)
    assert cache.num_bytes == CONFIG.num_hidden_layers * 2 * 3 * 4 * CONFIG.latent_dim * 4
    assert len(cache.latent[0].sharding.device_set) == 2
    jax.block_until_ready(cache)
