"""The attention layer as plain functions of a configuration, parameters and inputs.

The Flax layers in ``nnx`` and ``linen`` are views of this module: names, shapes, initial values and
the computation are defined here, once.

    x ── q_proj ──┐                  ┌── φ ── query ─────────────┐
    x ── k_proj ──┼── [short_conv] ──┼── φ ── key ───────────────┼── vla_attention ── norm ── o_proj
    x ── v_proj ──┘                  │   └─ (raw) u_proj ── u ───┤
                                     └── value ──────────────────┘

φ is ``feature_map``, ``elu + 1`` by default; the penalty direction ``u`` is a map of the *raw* key,
scaled to length ``1/√D``, with the inverse at the read to length 1.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vla_jax import (
    bundles,
    checks,
    diagnostics,
    meshes,
    numerics,
    ops,
    primitives,
    sharding,
    validation,
)
from vla_jax import plan as planning
from vla_jax.bundles import Attention
from vla_jax.convolution import convolve
from vla_jax.layer_config import (
    CONVS,
    DIRECTIONS,
    OPTIONS,
    OUTPUT_NORMS,
    QKV,
    FeatureMap,
    Initializer,
    LayerConfig,
    Parameter,
    Parameters,
    default_bias_init,
    default_kernel_init,
    init_parameters,
    options,
    parameters,
)
from vla_jax.types import Array, Arrays, DTypeLike, VLAState

__all__ = [
    "DIRECTIONS",
    "OPTIONS",
    "OUTPUT_NORMS",
    "FeatureMap",
    "Initializer",
    "LayerConfig",
    "LayerState",
    "Parameter",
    "Parameters",
    "apply",
    "default_bias_init",
    "default_kernel_init",
    "init_parameters",
    "init_state",
    "options",
    "parameters",
    "step",
]

_ANY_LENGTH = (None, "xla", "reference")  # those that jax.export takes with a symbolic T


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class LayerState(Arrays):
    """What a layer carries from token to token; a pytree of arrays of constant size.

    Attributes:
      vla: the memory of the recurrence.
      conv: ``[B, short_conv - 1, channels]``, the last projected tokens (query, key and value
        concatenated) that the short convolution still sees, oldest first, zeros before the
        sequence began; float32. None without a short convolution.
    """

    vla: VLAState
    conv: Array | None = None

    @property
    def memory(self) -> Array:
        """``vla.memory``, ``[B, H, D, E]``."""
        return self.vla.memory

    @property
    def penalty(self) -> Array:
        """``vla.penalty``, ``[B, H, D, D]``."""
        return self.vla.penalty

    @property
    def key_sum(self) -> Array:
        """``vla.key_sum``, ``[B, H, D]``."""
        return self.vla.key_sum


def init_state(config: LayerConfig, batch_size: int) -> LayerState:
    """The state of ``batch_size`` fresh sequences: all zeros, float32 (float64 in a float64 layer).

    Raises:
      TypeError, ValueError: if ``batch_size`` is not a positive integer.
    """
    dtype = numerics.accumulator_dtype(config.param_dtype if config.dtype is None else config.dtype)
    vla = ops.init_state(
        batch_size, config.num_kv_heads, config.head_dim, config.value_dim, dtype=dtype
    )
    if config.short_conv is None:
        return LayerState(vla)
    return LayerState(vla, jnp.zeros((batch_size, config.short_conv - 1, config.channels), dtype))


# --- computation -------------------------------------------------------------------------------


def _dense(config: LayerConfig, group: Mapping[str, Array], x: Array, num_inputs: int) -> Array:
    """``x`` times a kernel over its last ``num_inputs`` axes, plus bias."""
    kernel = group["kernel"].astype(x.dtype)
    contracted = tuple(range(x.ndim - num_inputs, x.ndim)), tuple(range(num_inputs))
    out = jax.lax.dot_general(x, kernel, (contracted, ((), ())), precision=config.precision)
    return out + group["bias"].astype(x.dtype) if "bias" in group else out


def checked_tokens(
    config: LayerConfig,
    params: Parameters,
    x: Any,
    mask: Any,
    segment_ids: Any,
    axis_name: str | None = None,
) -> tuple[Array, Array | None, Array | None]:
    """``x``, ``mask`` and ``segment_ids``, checked; ``x`` in the dtype of the computation."""
    x = validation.array("x", x, (None, None, config.in_features), "[B, T, in_features]")
    if jax.export.is_symbolic_dim(x.shape[1]) and config.implementation not in _ANY_LENGTH:
        raise NotImplementedError(
            f"implementation={config.implementation!r} needs a number for T, got {x.shape[1]}: "
            "export a symbolic T with implementation=None, 'xla' or 'reference'"
        )
    batch, length, _ = x.shape
    segment_ids, mask = validation.segments(segment_ids, mask, batch, length, axis_name)
    x = x.astype(_compute_dtype(config, params, x))
    return numerics.masked(x, mask), mask, segment_ids  # first of all: padding may hold NaN


def attention_inputs(
    config: LayerConfig,
    params: Parameters,
    x: Array,
    cache: Array | None,
    mask: Array | None,
    segment_ids: Array | None,
    axis_name: str | None = None,
) -> tuple[Array, Array, Array, Array | None, Array | None]:
    """``(query, key, value, direction, convolution cache)`` from ``x [B, T, in_features]``."""
    projected = [_dense(config, params[name], x, 1) for name in QKV]
    if config.short_conv is not None:
        shapes = [p.shape for p in projected]
        kernel = jnp.concatenate(
            [params[name]["kernel"].reshape(config.short_conv, -1) for name in CONVS], axis=-1
        )
        tokens = jnp.concatenate([p.reshape(*x.shape[:2], -1) for p in projected], axis=-1)
        out, cache = convolve(tokens, kernel, cache, mask, segment_ids, axis_name)
        ends = np.cumsum([math.prod(s[2:]) for s in shapes])[:-1]
        projected = [
            part.reshape(shape).astype(x.dtype)
            for part, shape in zip(jnp.split(out, ends, axis=-1), shapes, strict=True)
        ]
    query, key, value = projected
    direction = None
    if config.direction == "learned":
        direction = jnp.einsum(
            "bthd,hde->bthe",
            key,
            params["u_proj"]["kernel"].astype(key.dtype),
            precision=config.precision,
        )
        wide = numerics.normalize(direction.astype(numerics.accumulator_dtype(key.dtype)))
        direction = numerics.penalty_direction(wide, config.inverse).astype(key.dtype)
    query, key = (_features(config, x, mask) for x in (query, key))
    return query, key, value, direction, cache


def gates(config: LayerConfig, params: Parameters, x: Array) -> dict[str, Array]:
    """``beta`` and ``log_decay``, ``[B, T, H]`` and wide, as far as the layer has them."""
    wide = numerics.accumulator_dtype(x.dtype)
    found = {}
    if config.beta:
        found["beta"] = jax.nn.sigmoid(_dense(config, params["beta_proj"], x, 1).astype(wide))
    if config.decay:
        group = params["decay_proj"]
        softplus = jax.nn.softplus(_dense(config, group, x, 1).astype(wide))
        found["log_decay"] = -jnp.exp(group["log_rate"].astype(wide)) * softplus
    return found


def _features(config: LayerConfig, x: Array, mask: Array | None) -> Array:
    if mask is not None:  # a masked token may be 0, where a map need not have a derivative
        x = jnp.where(mask[..., None, None], x, 1)
    features = validation.array(
        "what feature_map returns", config.feature_map(x), x.shape, "[B, T, heads, D]"
    )
    return features.astype(x.dtype)


def output(config: LayerConfig, params: Parameters, out: Array, mask: Array | None = None) -> Array:
    """Output norm and projection of ``out [..., Hq, E]``; 0 where the mask is False."""
    if config.output_norm is not None:
        group = params["norm"]
        wide = out.astype(numerics.accumulator_dtype(out.dtype))
        if config.output_norm == "layer":
            wide = wide - jnp.mean(wide, axis=(-2, -1), keepdims=True)
            square = jnp.mean(wide * wide, axis=(-2, -1), keepdims=True)
        else:
            square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(square + config.norm_eps) * group["scale"].astype(wide.dtype)
        if "bias" in group:
            wide = wide + group["bias"].astype(wide.dtype)
        out = wide.astype(out.dtype)
    out = _dense(config, params["o_proj"], out, 2)
    return numerics.masked(out, mask)


def lambda0_of(config: LayerConfig, params: Parameters, dtype: DTypeLike) -> Any:
    """The initial penalty, learned or given: a positive number or one for each key/value head."""
    if config.learn_lambda0:
        wide = numerics.accumulator_dtype(dtype)
        low, high = numerics.lambda0_range(wide)
        log = params["penalty"]["log_lambda0"].astype(wide)  # however far it runs
        return jnp.maximum(jnp.exp(jnp.clip(log, math.log(low), math.log(high))), low)
    return np.asarray(config.lambda0)


def _compute_dtype(config: LayerConfig, params: Parameters, x: Array) -> DTypeLike:
    if config.dtype is not None:
        return config.dtype
    return jnp.result_type(x.dtype, params["q_proj"]["kernel"].dtype)


def _check_state(config: LayerConfig, state: Any, name: str, batch: int) -> None:
    if not isinstance(state, LayerState):
        raise TypeError(
            f"{name} must be the LayerState that init_state, step or an earlier call returned, "
            f"got {type(state).__name__}"
        )
    sizes = planning.Sizes(B=batch, H=config.num_kv_heads, D=config.head_dim, E=config.value_dim)
    planning.state_of(state.vla, f"{name}.vla", sizes, jnp.float32)
    check_conv(config, state.conv, name, batch)


def check_conv(config: LayerConfig, conv: Any, name: str, batch: int) -> None:
    """Checks ``conv`` of the state called ``name`` against the layer's convolution."""
    if config.short_conv is not None:
        shape = (batch, config.short_conv - 1, config.channels)
        validation.array(f"{name}.conv", conv, shape, "[B, short_conv - 1, channels]")
    elif conv is not None:
        raise ValueError(f"{name}.conv must be None in a layer without short_conv")


def _check_invariants(config: LayerConfig, inputs: Attention, mask: Array | None) -> None:
    """Computes ``k̂`` and, unless the inverse is at the read, ``α̂``, and asserts their lengths.

    With gates, asserts also that the solve converges.
    """
    inputs = planning.masked(jax.lax.stop_gradient(inputs), mask)
    unit_key = numerics.normalize(inputs.key.astype(numerics.accumulator_dtype(inputs.key.dtype)))
    direction = inputs.direction
    if direction is None:
        direction = numerics.penalty_direction(unit_key, config.inverse)
    at_read = config.inverse == "read"
    rhs = inputs.query.astype(unit_key.dtype) if at_read else unit_key
    problem: dict[str, Any] = {
        "rhs": rhs,
        "direction": direction.astype(unit_key.dtype),
        "lambda0": inputs.lambda0,
        "weight": inputs.beta,
        "log_decay": inputs.log_decay,
        "initial_penalty": inputs.penalty.astype(unit_key.dtype),
        "segment_ids": inputs.segment_ids,
    }
    if at_read:
        checks.assert_unit_norm(unit_key, name="the unit key")
    else:
        solution, _ = primitives.penalty_solve(**problem, implementation="xla")
        checks.assert_unit_key_and_gain(unit_key, numerics.normalize(solution))
    if at_read or bundles.gates(inputs):
        checks.assert_converged(diagnostics.solve_report(**problem).residual)


@meshes.explicit("B T -")
@numerics.broadcasts
def apply(
    config: LayerConfig,
    params: Parameters,
    x: Array,
    *,
    mask: Array | None = None,
    segment_ids: Array | None = None,
    initial_state: LayerState | None = None,
    return_state: bool = False,
    axis_name: str | None = None,
) -> Any:
    """The layer over whole sequences.

    Args:
      config: the options.
      params: ``{group: {name: array}}`` as ``parameters`` lists them.
      x: ``[B, T, in_features]``, floating point.
      mask: ``[B, T]`` booleans, False for padding, anywhere: such a token is absent for the
        convolution and the memory, whatever its input holds, and its output is 0.
      segment_ids: ``[B, T]`` integers that do not decrease: where the id changes, the memory and
        the convolution start afresh. Those of masked tokens do not count, as in ``vla_attention``.
      initial_state: the state to continue from; it belongs to the first segment.
      return_state: whether to return the state after the last token as well.
      axis_name: inside ``jax.shard_map``, the mesh axis over which T is sharded: ``x``, ``mask``
        and ``segment_ids`` are then this device's, parameters and states the same on all devices
        of the axis (``vla_jax.sharding``).

    Returns:
      ``out [B, T, out_features]`` in ``config.dtype`` (None: the common dtype of ``x`` and the
      parameters), or ``(out, state)``.

    Raises:
      ValueError, TypeError: for a bad argument, which the message names.
      NotImplementedError: if ``config.implementation`` cannot serve here.
    """
    validation.flag("return_state", return_state)
    if axis_name is not None:
        if config.check_invariants:
            raise ValueError(
                "check_invariants=True needs axis_name=None: it checks whole sequences"
            )
        sharding.axis_size(axis_name)
    x, mask, segment_ids = checked_tokens(config, params, x, mask, segment_ids, axis_name)
    if initial_state is None:
        state = init_state(config, x.shape[0])
    else:
        state = initial_state
        _check_state(config, state, "initial_state", x.shape[0])
    query, key, value, direction, conv = attention_inputs(
        config, params, x, state.conv, mask, segment_ids, axis_name
    )
    lambda0, weights = lambda0_of(config, params, x.dtype), gates(config, params, x)
    if config.check_invariants:
        fields = state.vla.memory, state.vla.penalty, state.vla.key_sum
        checked = Attention(query, key, value, direction, lambda0, *fields, segment_ids, **weights)
        _check_invariants(config, checked, mask)
    attention: Callable[..., Any] = ops.vla_attention
    if axis_name is not None:
        attention = functools.partial(sharding.context_parallel_attention, axis_name=axis_name)
    out, vla = attention(
        query,
        key,
        value,
        direction,
        **weights,
        inverse=config.inverse,
        lambda0=lambda0,
        initial_state=state.vla,
        segment_ids=segment_ids,
        mask=mask,
        write_gain=config.write_gain,
        readout=config.readout,
        implementation=config.implementation,
        precision=config.precision,
        return_state=True,
    )
    out = output(config, params, out, mask)
    return (out, LayerState(vla, conv)) if return_state else out


@meshes.explicit("B -")
@numerics.broadcasts
def step(
    config: LayerConfig, params: Parameters, x_t: Array, state: LayerState
) -> tuple[Array, LayerState]:
    """One token of ``apply``: for decoding, in time and memory that do not grow.

    Args:
      config, params: as in ``apply``.
      x_t: ``[B, in_features]``.
      state: what ``init_state``, ``apply`` or the previous step returned.

    Returns:
      ``(out [B, out_features], the new state)``.

    Raises:
      ValueError, TypeError: for a bad argument, which the message names.
      NotImplementedError: if ``config.implementation`` is ``"pallas"`` and cannot serve here.
    """
    x_t = validation.array("x_t", x_t, (None, config.in_features), "[B, in_features]")
    _check_state(config, state, "state", x_t.shape[0])
    x = x_t.astype(_compute_dtype(config, params, x_t))[:, None]
    query, key, value, direction, conv = attention_inputs(config, params, x, state.conv, None, None)
    lambda0, weights = lambda0_of(config, params, x.dtype), gates(config, params, x)
    if config.check_invariants:
        fields = state.vla.memory, state.vla.penalty, state.vla.key_sum
        checked = Attention(query, key, value, direction, lambda0, *fields, None, **weights)
        _check_invariants(config, checked, None)
    now = {name: gate[:, 0] for name, gate in weights.items()}
    out, vla = ops.vla_step(
        query[:, 0],
        key[:, 0],
        value[:, 0],
        None if direction is None else direction[:, 0],
        state.vla,
        beta=now.get("beta"),
        log_decay=now.get("log_decay"),
        inverse=config.inverse,
        lambda0=lambda0,
        write_gain=config.write_gain,
        readout=config.readout,
        implementation="pallas" if config.implementation == "pallas" else None,
    )
    return output(config, params, out), LayerState(vla, conv)
