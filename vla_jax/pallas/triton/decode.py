"""One decoding step, forward only: two launches, a program a head in both.

    refresh   derives the inverse from the penalty where there is none or where it is due
    step      equations (1) to (5) for one token

In float32 throughout, with ``A`` and the memory ``S`` on chip, so that every element of the state
is read once and written once. D and E are padded with zeros to powers of two, which changes
nothing: a zero feature is never read and never written.

No two programs write one place, and nothing is multiplied as matrices: sums over rows and columns,
which Triton takes through shared memory, a vector at a time.

Hazard: the state is updated in place. Every thread must have read what another writes: the age and
the key sum, of which each holds a copy, are read before ``backend.barrier`` and written after it.
The interpreter cannot show one that is missing. Run on an H200 with jax 0.11.2.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from vla_jax import numerics
from vla_jax.bundles import Step
from vla_jax.pallas import common
from vla_jax.pallas.triton import backend
from vla_jax.plan import Plan, Variant
from vla_jax.types import Array, VLAState


@dataclasses.dataclass(frozen=True)
class Parameters:
    """What is chosen for a size."""

    num_warps: int
    rederive_every: int = numerics.REDERIVE_EVERY  # steps between two looks at the penalty


TABLE = {32: Parameters(1), 64: Parameters(4), 128: Parameters(4)}  # {largest D or E: parameters}


class Sizes(NamedTuple):
    """Static sizes of one call, D and E padded."""

    batch: int
    heads: int
    groups: int
    dim: int
    value_dim: int
    true_dim: int

    def locate(self):
        """Inside a kernel: batch and head of this program, and its query heads."""
        stream = pl.program_id(0)
        batch, head = stream // self.heads, stream % self.heads
        return batch, head, [head * self.groups + g for g in range(self.groups)]


def unsupported(inputs: Step) -> str | None:
    """Why the kernels cannot serve this step here, or None."""
    state = inputs.state
    if max(state.memory.shape[-2:]) > max(TABLE):
        return (
            f"a step keeps the state on chip: head dimensions up to {max(TABLE)}, "
            f"got {max(state.memory.shape[-2:])}"
        )
    if any(x is None for x in (state.inverse, state.inverse_lambda0, state.inverse_age)):
        return (
            "it needs a state with its cache: one that init_state, vla_attention or vla_step "
            "returned"
        )
    return common.unserved(jax.tree.leaves(inputs._replace(lambda0=None)))


# --- pieces of kernels -------------------------------------------------------------------------

_STRIP = 16


def _wide(x: Array) -> Array:
    return x.astype(jnp.float32)


def _left(vector: Array, matrix: Array) -> Array:
    """``vectorᵀ matrix``."""
    return jnp.sum(vector[:, None] * matrix, axis=0)


def _dot(x: Array, y: Array) -> Array:
    return jnp.sum(x * y, axis=0)


def _outer(x: Array, y: Array) -> Array:
    return x[:, None] * y[None, :]


def _scaled_identity(dim: int, scale) -> Array:
    return jnp.where(backend.iota((dim, dim), 0) == backend.iota((dim, dim), 1), scale, 0.0)


def _invert(matrix: Array, floor: Array, count: Array) -> Array:
    """``matrix⁻¹`` of a symmetric positive definite matrix: the sweep operator, pivot by pivot.

    ``floor`` is a lower bound of its eigenvalues and so of the pivots; ``count`` is how many pivots
    to sweep: all of them, or none where the matrix is known to be diagonal already.
    """
    dim = matrix.shape[0]
    rows, cols, index = (
        backend.iota(s, a) for s, a in (((dim, dim), 0), ((dim, dim), 1), ((dim,), 0))
    )

    def step(j, matrix):
        row = jnp.sum(jnp.where(rows == j, matrix, 0.0), axis=0)
        pivot = jnp.maximum(jnp.sum(jnp.where(index == j, row, 0.0), axis=0), floor)
        row = jnp.where(index == j, -1.0, row) * jax.lax.rsqrt(pivot)
        return jnp.where((rows == j) | (cols == j), 0.0, matrix) - _outer(row, row)

    swept = backend.loop(count, step, matrix)
    return jnp.where(count > 0, -swept, _scaled_identity(dim, 1 / floor))


def _derive(penalty: Array, lam: Array) -> Array:
    """``(λ₀ I + penalty)⁻¹``, at no cost where the penalty is zero."""
    dim = penalty.shape[0]
    largest = jnp.max(jnp.max(jnp.abs(penalty), axis=1), axis=0)
    count = jnp.where(largest > 0, np.int32(dim), np.int32(0))
    return _invert(penalty + _scaled_identity(dim, lam), lam, count)


def _update_inverse(inverse: Array, u: Array, x: Array) -> tuple[Array, Array]:
    """Sherman–Morrison, equation (1), and the product of the new inverse with ``x``.

    Both products are taken with the old inverse, side by side.
    """
    w, y = _left(u, inverse), _left(x, inverse)
    w = w * jax.lax.rsqrt(1 + _dot(u, w))
    return inverse - _outer(w, w), y - w * _dot(w, x)


def _gain(alpha: Array, unit_key: Array, write_gain: str) -> Array:
    """The scale of the write key, equation (3); 0 for an absent token."""
    if write_gain == "unit":
        return backend.inverse_norm(alpha)
    if write_gain == "projection":
        overlap = _dot(alpha, unit_key)
        present = overlap > 0
        return jnp.where(present, 1 / jnp.where(present, overlap, 1), 0)
    return jnp.float32(1)


# --- the kernels -------------------------------------------------------------------------------


def _misfit(row: Callable, lam, inverse: Array) -> Array:
    """Largest entry of ``I − (λ₀ I + penalty) inverse``; infinite where it is not a number."""
    dim = inverse.shape[0]

    def step(i, largest):
        here = backend.iota((dim,), 0) == i
        product = _left(row(i) + jnp.where(here, lam, 0.0), inverse)
        rest = jnp.abs(jnp.where(here, 1.0, 0.0) - product)
        return jnp.maximum(largest, jnp.max(jnp.where(rest < np.inf, rest, np.inf), axis=0))

    return backend.loop(dim, step, jnp.float32(0))


def _refresh_kernel(lam, *refs, s: Sizes, rederive_every: int):
    """Derives the inverse where there is none, or where it is due and the derived one is better.

    In place. Nearly always there is nothing to do: a launch of its own keeps the registers that
    this takes out of the step. Grid: (heads). Registers, where there is something to do: a matrix
    ``[D, D]``, 32 numbers a thread at D = 128.
    """
    penalty, inverse, inverse_lambda0, age = refs[4:]
    b, h, _ = s.locate()
    lam = lam[b, h]
    absent = inverse_lambda0[b, h] != lam
    due = absent | (age[b, h] >= rederive_every)
    backend.barrier()  # every thread has read them

    @pl.when(absent)
    def _():
        def symmetrize(i, carry):  # in strips, to need few registers; the inverse is free to use
            strip = pl.ds(i * _STRIP, _STRIP)
            inverse[b, h, strip, :] = (penalty[b, h, strip, :] + penalty[b, h, :, strip].T) * 0.5
            return carry

        backend.loop(s.dim // _STRIP, symmetrize, np.int32(0))
        backend.barrier()
        penalty[b, h] = inverse[b, h]
        backend.barrier()

    @pl.when(due)
    def _():
        misfit = functools.partial(_misfit, lambda i: penalty[b, h, i, :], lam)
        carried = misfit(inverse[b, h])
        derived = _derive(penalty[b, h], lam)
        better = absent | (2 * misfit(derived) < carried)

        @pl.when(better)
        def _():
            inverse[b, h] = derived

        backend.barrier()
        inverse_lambda0[b, h] = lam
        age[b, h] = jnp.float32(0)


def _step_kernel(*refs, s: Sizes, variant: Variant, learned: bool, compensated: bool):
    """One token of one head: every element of the state is read once and written once.

    The state is updated in place, so only the output references are used. Grid: (heads). Registers:
    one matrix at a time, ``[D, D]`` or ``[D, E]``: 128 numbers a thread at D = E = 128.
    """
    query, key, value, *rest = refs
    direction = rest.pop(0) if learned else None
    out, memory, penalty, key_sum, inverse, age, *rest = rest[6 if compensated else 5 :]
    b, h, queries = s.locate()
    k = _wide(key[b, h, :])
    unit_key = k * backend.inverse_norm(k)
    u = unit_key * np.float32(s.true_dim**-0.5) if direction is None else _wide(direction[b, h, :])
    a, alpha = _update_inverse(inverse[b, h], u, unit_key)
    inverse[b, h] = a
    write = alpha * _gain(alpha, unit_key, variant.write_gain)
    mem = memory[b, h]
    mem = mem + _outer(write, _wide(value[b, h, :]) - _left(unit_key, mem))
    memory[b, h] = mem
    z = key_sum[b, h] + k
    for g in queries:
        q = _wide(query[b, g, :])
        read = _left(q, mem)
        if variant.readout == "ratio":
            read = read / jnp.maximum(_dot(q, z), variant.eps)
        out[b, g, :] = read.astype(out.dtype)
    age_now = age[b, h]
    backend.barrier()  # every thread has read the key sum and the age by now
    added = _outer(u, u)
    if compensated:  # what this addition rounds away is added with the next one
        added = added + rest[0][b, h]
    before = penalty[b, h]
    after = before + added
    penalty[b, h] = after
    if compensated:
        rest[0][b, h] = added - (after - before)
    key_sum[b, h] = z
    age[b, h] = age_now + 1


# --- the primitive -----------------------------------------------------------------------------


def _pad(x: Array, *widths: int) -> Array:
    """``x`` with its last axes padded with zeros to ``widths``."""
    if x.shape[x.ndim - len(widths) :] == widths:
        return x
    pads = [(0, 0)] * (x.ndim - len(widths))
    pads += [(0, w - n) for w, n in zip(widths, x.shape[-len(widths) :], strict=True)]
    return jnp.pad(x, pads)


def _struct(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def forward(
    plan: Plan, inputs: Step, params: Parameters | None = None
) -> tuple[tuple[Array, VLAState], None]:
    """``(out [B, Hq, E] in query's dtype, the new state)``, and nothing kept.

    The state is updated in place where XLA can give it away.

    Args:
      plan: of which only the variant counts.
      inputs: ``lambda0 [B, H]``; the state is float32, with its cache (only ``penalty_rest`` may be
        None). Where the cache does not hold for ``lambda0``, or is due to be compared with the
        penalty, the first launch derives the inverse.
      params: None for those of the table.
    """
    query, key, value, direction, lambda0, state, *_ = inputs
    batch, heads, dim = key.shape
    value_dim = value.shape[-1]
    s = Sizes(
        batch,
        heads,
        query.shape[1] // heads,
        common.power_of_two(dim),
        common.power_of_two(value_dim),
        dim,
    )
    params = params or common.parameters(TABLE, max(s.dim, s.value_dim))
    tokens = [_pad(x, s.dim) for x in (query, key)] + [_pad(value, s.value_dim)]
    tokens += [] if direction is None else [_pad(direction, s.dim)]
    memory = _pad(state.memory, s.dim, s.value_dim)
    rest = [] if state.penalty_rest is None else [_pad(state.penalty_rest, s.dim, s.dim)]
    cache = [_pad(x, s.dim, s.dim) for x in (state.penalty, state.inverse)]
    cache += [state.inverse_lambda0, state.inverse_age]
    penalty, inverse, inverse_lambda0, age = backend.call(
        functools.partial(_refresh_kernel, s=s, rederive_every=params.rederive_every),
        [lambda0, *cache],
        [_struct(x) for x in cache],
        grid=(batch * heads,),
        warps=max(4, s.dim // 8),
        name="vla_decode_refresh",
        aliases={1 + i: i for i in range(len(cache))},
    )
    fields = [memory, penalty, _pad(state.key_sum, s.dim), inverse, age, *rest]
    kernel = functools.partial(
        _step_kernel,
        s=s,
        variant=plan.variant,
        learned=direction is not None,
        compensated=bool(rest),
    )
    out, memory, penalty, key_sum, inverse, age, *rest = backend.call(
        kernel,
        [*tokens, *fields],
        [jax.ShapeDtypeStruct((*query.shape[:2], s.value_dim), query.dtype), *map(_struct, fields)],
        grid=(batch * heads,),
        warps=params.num_warps,
        name="vla_decode_step",
        aliases={len(tokens) + i: 1 + i for i in range(len(fields))},
    )
    new = VLAState(
        memory=memory[..., :dim, :value_dim],
        penalty=penalty[..., :dim, :dim],
        key_sum=key_sum[..., :dim],
        inverse=inverse[..., :dim, :dim],
        inverse_lambda0=inverse_lambda0,
        inverse_age=age,
        penalty_rest=rest[0][..., :dim, :dim] if rest else None,
    )
    return (out[..., :value_dim], new), None
