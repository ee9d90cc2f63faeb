"""The kernels behind the signatures that ``vla_jax.primitives`` joins, and the whole layer fused.

An array's batch is its leading axis everywhere here, ``lambda0 [B, H]`` included, so that ``vmap``
folds into the batch instead of looping over launches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from vla_jax import numerics
from vla_jax.pallas import backend
from vla_jax.pallas import delta_rule as delta
from vla_jax.pallas import penalty_solve as solve
from vla_jax.types import Array


def _folded(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with static options, its arrays' ``vmap`` folded into the batch."""

    @functools.wraps(function)
    def call(*args, **options):
        return backend.fold_batch(functools.partial(function, **options))(*args)

    return call


def require(dtypes, dims, chunk_size, operation: str = "vla_attention") -> None:
    """Raises NotImplementedError, saying why, where the kernels cannot serve ``operation``."""
    backend.require(operation, dtypes, dims)
    if chunk_size is not None:
        raise NotImplementedError(
            "chunk_size must be None with implementation='pallas', whose tiles come from a table "
            f"of parameters for each device; got {chunk_size}"
        )


@_folded
def _penalty_solve_forward(rhs, direction, lambda0, initial_penalty, segment_ids, **options):
    solution, _, penalty, kept = solve.forward(
        rhs, direction, lambda0, initial_penalty, segment_ids, **options
    )
    return solution, penalty, kept


def penalty_solve_forward(*args, policy: numerics.Policy, chunk_size: int | None = None):
    """As ``chunkwise.penalty_solve_forward``, with ``lambda0 [B, H]``."""
    return _penalty_solve_forward(*args, precision=policy.requested)


@_folded
def _penalty_solve_backward(
    rhs, direction, lambda0, _, segment_ids, kept, d_solution, d_penalty, **options
):
    return solve.backward(
        rhs, direction, lambda0, segment_ids, None, kept, d_solution, d_penalty, **options
    )


def penalty_solve_backward(*args, policy: numerics.Policy, chunk_size: int | None = None):
    """As ``chunkwise.penalty_solve_backward``, with ``lambda0 [B, H]``."""
    return _penalty_solve_backward(*args, precision=policy.requested)


@_folded
def _delta_rule_forward(query, key, write_key, value, memory, segment_ids, **options):
    out, memory, _, residuals = delta.forward(
        query, key, write_key, value, memory, segment_ids, save_residuals=True, **options
    )
    return out, memory, residuals


def delta_rule_forward(*args, policy: numerics.Policy, chunk_size: int | None = None):
    """As ``chunkwise.delta_rule_forward``."""
    return _delta_rule_forward(*args, precision=policy.requested)


@_folded
def _delta_rule_backward(
    query, key, write_key, value, segment_ids, residuals, d_out, d_memory, **options
):
    d_query, d_key, _, d_write_key, d_value, d_initial, _ = delta.backward(
        residuals, query, key, write_key, value, None, segment_ids, d_out, d_memory, None, **options
    )
    return d_query, d_key, d_write_key, d_value, d_initial


def delta_rule_backward(*args, policy: numerics.Policy, chunk_size: None):
    """As ``chunkwise.delta_rule_backward``."""
    return _delta_rule_backward(*args, precision=policy.requested)


# --- the whole layer: normalisation, solve, write gain, delta rule and ratio ---------------------


def _last_tokens(segment_ids: Array | None) -> tuple[Array | bool, Array | bool]:
    """Which tokens ``[B, T, 1, 1]`` are of the last segment, and where ``[B, 1, 1]`` it is all."""
    if segment_ids is None:
        return True, True
    last = segment_ids == segment_ids[:, -1:]
    return last[..., None, None], last[:, :1, None]


@_folded
def _attention_forward(
    query, key, value, direction, lambda0, memory, penalty, key_sum, segment_ids,
    *, precision, variant,
):  # fmt: skip
    write_key, gain, penalty_out, kept = solve.forward(
        key, direction, lambda0, penalty, segment_ids,
        normalize_rhs=True, write_gain=variant.write_gain, precision=precision,
    )  # fmt: skip
    out, memory_out, key_sum_out, residuals = delta.forward(
        query, key, write_key, value, memory, segment_ids,
        normalize_key=True, readout=variant.readout, initial_key_sum=key_sum, eps=variant.eps,
        precision=precision, save_residuals=True, write_rest=solve.rest(kept, key),
        solve_rest=variant.write_gain == "rls",
    )  # fmt: skip
    if variant.readout == "none":  # nobody read the key sum; the state has it all the same
        last, whole = _last_tokens(segment_ids)
        key_sum_out = jnp.where(whole, key_sum, 0) + jnp.sum(
            jnp.where(last, key, 0), axis=1, dtype=jnp.float32
        )
    return out, memory_out, penalty_out, key_sum_out, write_key, gain, kept, residuals


def attention_forward(*args, policy: numerics.Policy, variant: Any):
    """``((out, memory, penalty, key_sum), residuals)`` of the whole of ``vla_attention``.

    Args:
      *args: ``query [B, T, Hq, D]``, ``key [B, T, H, D]``, ``value [B, T, H, E]``, ``direction``
        (like ``key``, or None), ``lambda0 [B, H]``, ``memory``, ``penalty``, ``key_sum`` of the
        initial state, ``segment_ids [B, T]`` or None.
      policy: only the precision asked for counts: the kernels have arithmetic of their own.
      variant: ``write_gain``, ``readout`` and ``eps``.
    """
    out, memory, penalty, key_sum, *saved = _attention_forward(
        *args, precision=policy.requested, variant=variant
    )
    return (out, memory, penalty, key_sum), (args, saved)


@_folded
def _attention_backward(
    query, key, value, direction, lambda0, memory, penalty, key_sum, segment_ids,
    write_key, gain, kept, residuals, d_out, d_memory, d_penalty, d_key_sum, *, precision, variant,
):  # fmt: skip
    d_query, d_unit_key, d_raw_key, d_write_key, d_value, d_memory, d_initial_sum = delta.backward(
        residuals, query, key, write_key, value, memory, segment_ids, d_out, d_memory, d_key_sum,
        normalize_key=True, readout=variant.readout, initial_key_sum=key_sum, eps=variant.eps,
        precision=precision, write_rest=solve.rest(kept, key),
    )  # fmt: skip
    if variant.readout == "none":
        last, whole = _last_tokens(segment_ids)
        d_raw_key = jnp.where(last, d_key_sum[:, None], jnp.zeros(key.shape, jnp.float32))
        d_initial_sum = jnp.where(whole, d_key_sum, 0)
    d_key, d_direction, d_lambda0, d_penalty = solve.backward(
        key, direction, lambda0, segment_ids, gain, kept, d_write_key, d_penalty,
        normalize_rhs=True, write_gain=variant.write_gain, precision=precision,
        d_normalized_rhs=d_unit_key, d_raw_rhs=d_raw_key,
    )  # fmt: skip
    return d_query, d_key, d_value, d_direction, d_lambda0, d_memory, d_penalty, d_initial_sum


def attention_backward(residuals, cotangents, *, policy: numerics.Policy, variant: Any):
    """Cotangents of the first eight arguments of ``attention_forward``."""
    args, saved = residuals
    return _attention_backward(
        *args, *saved, *cotangents, precision=policy.requested, variant=variant
    )
