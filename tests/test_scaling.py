"""What must not grow with T: program size, compilations, and anything of size T x T."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import vla_jax

D, E, H = 16, 8, 2


def shapes(length):
    return [jax.ShapeDtypeStruct((1, length, H, d), jnp.float32) for d in (D, D, E, D)]


@functools.lru_cache(None)
def lowered(length, implementation):
    """Forward and backward, output and state, lowered for this length."""

    @jax.jit
    def run(query, key, value, direction):
        def primal(*inputs):
            out, state = vla_jax.vla_attention(
                *inputs, implementation=implementation, return_state=True
            )
            return out.sum() + state.memory.sum() + state.penalty.sum()

        return jax.value_and_grad(primal, (0, 1, 2, 3))(query, key, value, direction)

    return run.lower(*shapes(length))


def tensors(text):
    """The shapes of all arrays in a lowered program."""
    found = set(re.findall(r"tensor<((?:\d+x)+)[a-z]", text))
    return [[int(n) for n in shape.rstrip("x").split("x")] for shape in found]


def test_pitfall_28_program_does_not_grow_with_length(implementation):
    short, long = (len(lowered(n, implementation).as_text()) for n in (4096, 32768))
    # The associative scan has one level for each doubling of the number of chunks: 3 more here.
    assert long <= short * (1.6 if implementation == "associative" else 1.02)


def test_nothing_of_size_length_squared(implementation):
    """No array with two axes of about T, none much larger than the inputs and chunk matrices."""
    length = 4099
    found = tensors(lowered(length, implementation).as_text())
    assert any(length in shape for shape in found)
    for shape in found:
        assert sum(n >= length // 4 for n in shape) <= 1, shape


def test_no_matrix_for_each_token(fast_implementation):
    """Nothing of size T x D x D either: at most a few chunk-sized rows for each token."""
    length, widest = 4096, 64
    for shape in tensors(lowered(length, fast_implementation).as_text()):
        elements = functools.reduce(int.__mul__, shape)
        assert elements <= 2 * length * H * max(widest, D + E), shape


@pytest.mark.slow
def test_memory_is_linear_in_length(fast_implementation):
    analyses = [lowered(n, fast_implementation).compile().memory_analysis() for n in (4096, 32768)]
    if any(a is None for a in analyses):
        pytest.skip("no memory analysis on this platform")
    short, long = (a.temp_size_in_bytes for a in analyses)
    assert long <= 8 * 1.1 * short


def test_no_recompilation_for_a_repeated_shape(implementation, compilations):
    """Eager calls: every call after the first of a shape finds its program."""
    calls = [[jnp.ones(s.shape, s.dtype) for s in shapes(n)] for n in (24, 25, 12)]
    for inputs in calls:
        vla_jax.vla_attention(*inputs, implementation=implementation)
    compilations.clear()
    for inputs in (*calls, *calls):
        vla_jax.vla_attention(*inputs, implementation=implementation)
    assert not compilations
