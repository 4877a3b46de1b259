import jax
import jax.numpy as jnp
import numpy as np
import pytest

from custom_calls.ordering import hold_until


RNG = np.random.default_rng(0)


@pytest.mark.parametrize("shape", [(), (7,), (3, 5)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
def test_gives_its_operand(shape, dtype):
    x = jnp.asarray(100 * RNG.standard_normal(shape), dtype)
    held = jax.jit(hold_until)(x, jnp.zeros(2))
    assert held.dtype == dtype
    assert (held == x).all()


def test_leaves_an_operand_that_is_read_again_as_it_was():
    x = jnp.asarray(RNG.standard_normal(64), jnp.float32)
    doubled, kept = jax.jit(lambda x: (2 * hold_until(x, x[0]), x))(x)
    assert (doubled == 2 * kept).all()
    assert (kept == x).all()


def test_nothing_to_wait_for_is_no_operation():
    x = jnp.ones(3)
    assert hold_until(x, None) is x


def test_what_follows_depends_on_both_in_the_compiled_program():
    def program(x, y):
        return jnp.sin(hold_until(x, jnp.cos(y)))

    text = jax.jit(program).lower(jnp.ones(8), jnp.ones(8)).compile().as_text()
    (held,) = (line for line in text.splitlines() if "jaxmoe_hold_until" in line and " = " in line)
    assert "cos" in text
    assert held.count("%") >= 3, held  # the result and both operands
