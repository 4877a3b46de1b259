"""Small checkpoints, written once."""

import jax
import numpy as np
import pytest

from jaxmoe.checkpoint import RANDOM_CONFIGS, write_random_checkpoint


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory):
    """A function from a configuration's name and options to a directory nobody may write to."""
    made = {}

    def get(name, **options):
        key = (name, *sorted(options.items()))
        if key not in made:
            target = tmp_path_factory.mktemp(name) / "model"
            made[key] = write_random_checkpoint(target, RANDOM_CONFIGS[name], seed=3, **options)
        return made[key]

    return get


@pytest.fixture(scope="session")
def assert_same_model():
    def check(found, expected):
        def check_array(path, a, b):
            name = jax.tree_util.keystr(path)
            assert a.dtype == b.dtype, name
            assert a.sharding == b.sharding, name
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=name)

        jax.tree_util.tree_map_with_path(check_array, found.params, expected.params)
        assert jax.tree.all(
            jax.tree.map(
                lambda a, b: bool((np.asarray(a) == np.asarray(b)).all()),
                found.placement,
                expected.placement,
            )
        )

    return check
