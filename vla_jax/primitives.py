"""``penalty_solve`` and ``delta_rule``: differentiation, choice of implementation, each once.

An implementation supplies a forward and a closed-form backward with the signatures of
``chunkwise``; the custom derivative rule that joins them is here, once a primitive. The reference
needs no rule: JAX differentiates it.

What the rules keep for the backward beside the inputs is named for ``jax.checkpoint`` policies:
``"vla_solution"`` (of the solve) and ``"vla_memory"`` (of the delta rule).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from vla_jax import associative, chunkwise, numerics, reference, validation
from vla_jax.types import Array, ArrayLike, Implementation, PrecisionLike, VLAState

IMPLEMENTATIONS = ("reference", "xla", "associative", "pallas", "triton")

# Implementations that run the whole of ``vla_attention`` themselves, and where they live. Imported
# when asked for: they need packages or devices that others do without.
FUSED = {"pallas": "vla_jax.pallas.attention", "triton": "vla_jax.triton"}


def _module(implementation: str) -> Any:
    """The module whose ``*_forward`` and ``*_backward`` an implementation is."""
    if implementation in FUSED:
        return importlib.import_module(FUSED[implementation])
    return {"xla": chunkwise, "associative": associative}[implementation]


@dataclasses.dataclass(frozen=True)
class Config:
    """The static arguments of a primitive."""

    implementation: str
    policy: numerics.Policy
    chunk_size: int | None = None


def configure(
    *inputs: Array,
    implementation: Implementation | None,
    chunk_size: int | None,
    precision: PrecisionLike,
    operation: str = "vla_attention",
    others: tuple[Array, ...] = (),
) -> Config:
    """Chooses the implementation and the arithmetic for these inputs of ``operation``.

    ``implementation=None`` is what ``best`` says; a name forces it. The implementation must serve
    ``others`` too, which do not decide the arithmetic.

    Raises:
      ValueError, TypeError: if an option has no such value.
      NotImplementedError: if the named implementation cannot run here, or with that option.
    """
    if chunk_size is not None:
        validation.positive("chunk_size", chunk_size, integer=True)
    policy = numerics.policy(*inputs, precision=precision)
    if implementation is None:
        return Config(best(*inputs, *others, chunk_size=chunk_size), policy, chunk_size)
    validation.choice("implementation", implementation, IMPLEMENTATIONS)
    if implementation in FUSED:
        dtypes = tuple(x.dtype for x in (*inputs, *others))
        dims = tuple(x.shape[-1] for x in inputs)
        _module(implementation).require(dtypes, dims, chunk_size, operation)
    return Config(implementation, policy, chunk_size)


def best(*inputs: Array, chunk_size: int | None = None) -> str:
    """The fastest implementation that is sure to serve: ``"pallas"`` or ``"xla"``.

    The kernels, where they can serve these dtypes and sizes, if the arrays are on one GPU: JAX's
    default device is one, and either it is the only one, or the call is inside ``jax.shard_map``,
    or the arrays are concrete and say so. The compiler cannot partition a kernel: under ``jit``
    with several GPUs "xla" is chosen, which it can.
    """
    if jax.default_backend() != "gpu" or chunk_size is not None:
        return "xla"
    default = getattr(jax.config, "jax_default_device", None)
    if default is not None and getattr(default, "platform", default) not in ("gpu", "cuda"):
        return "xla"
    concrete = [x for x in inputs if not isinstance(x, jax.core.Tracer)]
    if any(len(x.devices()) > 1 or next(iter(x.devices())).platform != "gpu" for x in concrete):
        return "xla"
    mesh = jax.sharding.get_abstract_mesh()
    manual = bool(mesh.axis_names) and set(mesh.manual_axes) == set(mesh.axis_names)
    if len(concrete) < len(inputs) and jax.device_count() > 1 and not manual:
        return "xla"
    dtypes, dims = (tuple(f(x) for x in inputs) for f in (lambda x: x.dtype, lambda x: x.shape[-1]))
    try:
        _module("pallas").require(dtypes, dims, None)
    except NotImplementedError:
        return "xla"
    return "pallas"


@jax.custom_jvp
def _once(*arrays: Any) -> Any:
    """Identity that refuses to be differentiated."""
    return arrays


@_once.defjvp
def _once_jvp(primals, tangents):
    raise NotImplementedError(
        "second-order differentiation needs implementation='reference': "
        "the other implementations have a closed-form first derivative only"
    )


def _differentiated_once(rule):
    """Refuses derivatives of a forward or backward ``rule`` before they meet a kernel."""

    @functools.wraps(rule)
    def wrapped(*args):
        static = sum(isinstance(x, Config | Variant) for x in args)
        return rule(*args[:static], *_once(*args[static:]))

    return wrapped


def first_order_only(function):
    """Gives ``function`` the error for forward-mode differentiation that names the remedy."""

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if "forward-mode" in str(error):
                raise NotImplementedError(
                    "forward-mode differentiation (jvp, jacfwd, hessian) needs "
                    "implementation='reference': the other implementations have a closed-form "
                    "reverse-mode derivative only"
                ) from error
            raise

    return wrapped


# --- penalty_solve -----------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _penalty_solve(config, rhs, direction, lambda0, initial_penalty, segment_ids):
    return _penalty_solve_fwd(config, rhs, direction, lambda0, initial_penalty, segment_ids)[0]


@_differentiated_once
def _penalty_solve_fwd(config, rhs, direction, lambda0, initial_penalty, segment_ids):
    solution, penalty, kept = _module(config.implementation).penalty_solve_forward(
        rhs,
        direction,
        lambda0,
        initial_penalty,
        segment_ids,
        policy=config.policy,
        chunk_size=config.chunk_size,
    )
    kept = checkpoint_name(kept, "vla_solution")
    return (solution, penalty), (rhs, direction, lambda0, initial_penalty, segment_ids, kept)


@_differentiated_once
def _penalty_solve_bwd(config, residuals, cotangents):
    backward = _module(config.implementation).penalty_solve_backward
    d_rhs, d_direction, d_lambda0, d_penalty = backward(
        *residuals, *cotangents, policy=config.policy, chunk_size=config.chunk_size
    )
    rhs, direction, *_ = residuals
    d_rhs, d_direction = d_rhs.astype(rhs.dtype), d_direction.astype(direction.dtype)
    return d_rhs, d_direction, d_lambda0, d_penalty, None


_penalty_solve.defvjp(_penalty_solve_fwd, _penalty_solve_bwd)


def solve(
    config: Config,
    rhs: Array,
    direction: Array,
    lambda0: Array,
    initial_penalty: Array,
    segment_ids: Array | None,
) -> tuple[Array, Array]:
    """``penalty_solve`` on validated arguments: ``lambda0 [H]``, state and result wide."""
    initial_penalty = numerics.symmetrize(initial_penalty)
    if config.implementation == "reference":
        return reference.penalty_solve(rhs, direction, lambda0, initial_penalty, segment_ids)
    if config.implementation in FUSED:
        lambda0 = jnp.broadcast_to(lambda0, initial_penalty.shape[:2])
    return _penalty_solve(config, rhs, direction, lambda0, initial_penalty, segment_ids)


@first_order_only
def penalty_solve(
    rhs: Array,
    direction: Array,
    *,
    lambda0: ArrayLike,
    initial_penalty: Array | None = None,
    segment_ids: Array | None = None,
    chunk_size: int | None = None,
    implementation: Implementation | None = None,
    precision: PrecisionLike = None,
) -> tuple[Array, Array]:
    """Causal regularised least squares: ``α_t = (λ₀ I + M₀ + Σ_{s≤t} u_s u_sᵀ)⁻¹ rhs_t``.

    With ``rhs`` the unit keys this is VLA's write direction before normalisation; with the queries
    in their place it is the exact solution that MesaNet approximates (von Oswald et al., 2025).
    Equations (1) and (2) of ``docs/derivation.md``.

    Args:
      rhs: ``[B, T, H, D]``, floating point.
      direction: ``[B, T, H, D]``, the ``u`` of the penalty, used as given.
      lambda0: scalar or ``[H]``, positive: the initial penalty. What float32 makes of a tiny one:
        ``docs/derivation.md``, section 2.
      initial_penalty: ``[B, H, D, D]``, symmetric (only its symmetric part is used), without the
        ``lambda0`` term. It belongs to the first segment. Default zeros.
      segment_ids: ``[B, T]`` integers that do not decrease: where the id changes the penalty
        restarts from zero.
      chunk_size: tokens of a chunk of ``"xla"`` and ``"associative"``; changes speed and memory,
        of the result no more than its rounding. ``"reference"`` has no chunks, and the GPU kernels
        refuse it.
      implementation: ``None`` or one of ``"reference"``, ``"xla"``, ``"associative"``,
        ``"pallas"``, ``"triton"``, as in ``vla_attention``.
      precision: of the matrix products, as in ``jax.lax``; by default float32-accurate for float32
        inputs, tf32 (where the device has it) for 16-bit inputs. ``"reference"`` has no matrix
        products and computes in its dtype always.

    Returns:
      ``(solution, penalty)``: ``[B, T, H, D]`` in the dtype of ``rhs``, and the penalty of the last
      segment without the ``lambda0`` term, ``[B, H, D, D]``, float32 (float64 with float64 inputs).

    Raises:
      ValueError, TypeError: for a bad argument, which the message names.
      NotImplementedError: if the named implementation cannot serve here, and for forward-mode or
        second-order differentiation of any but ``"reference"``.
    """
    rhs = validation.array("rhs", rhs, (None,) * 4, "[B, T, H, D]")
    direction = validation.array("direction", direction, rhs.shape, "[B, T, H, D]")
    batch, length, heads, dim = rhs.shape
    config = configure(
        rhs, direction, operation="penalty_solve",
        implementation=implementation, chunk_size=chunk_size, precision=precision,
    )  # fmt: skip
    dtype = config.policy.accumulator
    if initial_penalty is None:
        initial_penalty = jnp.zeros((batch, heads, dim, dim), dtype)
    else:
        initial_penalty = validation.array(
            "initial_penalty", initial_penalty, (batch, heads, dim, dim), "[B, H, D, D]"
        ).astype(dtype)
    return _jit_penalty_solve(
        config,
        rhs,
        direction,
        validation.lambda0(lambda0, heads, dtype),
        initial_penalty,
        validation.segment_ids(segment_ids, batch, length),
    )


@functools.partial(jax.jit, static_argnums=0)
def _jit_penalty_solve(config, *args):
    rhs, *args = numerics.varying_alike(args)
    solution, penalty = solve(config, rhs, *args)
    return solution.astype(rhs.dtype), penalty


# --- delta_rule --------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _delta_rule(config, query, key, write_key, value, initial_memory, segment_ids):
    return _delta_rule_fwd(config, query, key, write_key, value, initial_memory, segment_ids)[0]


@_differentiated_once
def _delta_rule_fwd(config, query, key, write_key, value, initial_memory, segment_ids):
    out, memory, starts = _module(config.implementation).delta_rule_forward(
        query,
        key,
        write_key,
        value,
        initial_memory,
        segment_ids,
        policy=config.policy,
        chunk_size=config.chunk_size,
    )
    starts = checkpoint_name(starts, "vla_memory")
    return (out, memory), (query, key, write_key, value, segment_ids, starts)


@_differentiated_once
def _delta_rule_bwd(config, residuals, cotangents):
    *tokens, d_initial = _module(config.implementation).delta_rule_backward(
        *residuals, *cotangents, policy=config.policy, chunk_size=config.chunk_size
    )
    tokens = (d.astype(x.dtype) for d, x in zip(tokens, residuals[:4], strict=True))
    return *tokens, d_initial, None


_delta_rule.defvjp(_delta_rule_fwd, _delta_rule_bwd)


def delta(
    config: Config,
    query: Array,
    key: Array,
    write_key: Array,
    value: Array,
    initial_memory: Array,
    segment_ids: Array | None,
) -> tuple[Array, Array]:
    """``delta_rule`` on validated arguments; the result is wide, as the state is."""
    if config.implementation == "reference":
        return reference.delta_rule(query, key, write_key, value, initial_memory, segment_ids)
    return _delta_rule(config, query, key, write_key, value, initial_memory, segment_ids)


@first_order_only
def delta_rule(
    query: Array,
    key: Array,
    write_key: Array,
    value: Array,
    *,
    initial_memory: Array | None = None,
    segment_ids: Array | None = None,
    chunk_size: int | None = None,
    implementation: Implementation | None = None,
    precision: PrecisionLike = None,
) -> tuple[Array, Array]:
    """The generalised delta rule: ``S_t = S_{t-1} + (v_t − S_{t-1} k_t) a_tᵀ``, ``o_t = S_t q_t``.

    ``write_key = β key`` with unit keys is DeltaNet (Yang et al., 2024). Equations (4) and (5) of
    ``docs/derivation.md``, without the ratio.

    Args:
      query: ``[B, T, Hq, D]``, Hq a multiple of H: head ``h`` reads state ``h // (Hq / H)``.
      key: ``[B, T, H, D]``, used as given (not normalised).
      write_key: ``[B, T, H, D]``, the ``a`` above.
      value: ``[B, T, H, E]``.
      initial_memory: ``[B, H, D, E]``, key dimension first; of the first segment. Default zeros.
      segment_ids: ``[B, T]`` integers that do not decrease: where the id changes the memory
        restarts from zero.
      chunk_size, implementation, precision: as in ``penalty_solve``.

    Returns:
      ``(out, memory)``: ``[B, T, Hq, E]`` in the dtype of ``query``, and the memory of the last
      segment, ``[B, H, D, E]``, float32 (float64 with float64 inputs).

    Raises:
      As ``penalty_solve``.
    """
    key = validation.array("key", key, (None,) * 4, "[B, T, H, D]")
    batch, length, heads, dim = key.shape
    query = validation.array("query", query, (batch, length, None, dim), "[B, T, Hq, D]")
    validation.query_heads(query, heads)
    write_key = validation.array("write_key", write_key, key.shape, "[B, T, H, D]")
    value = validation.array("value", value, (batch, length, heads, None), "[B, T, H, E]")
    config = configure(
        query, key, write_key, value, operation="delta_rule",
        implementation=implementation, chunk_size=chunk_size, precision=precision,
    )  # fmt: skip
    dtype = config.policy.accumulator
    shape = (batch, heads, dim, value.shape[-1])
    if initial_memory is None:
        initial_memory = jnp.zeros(shape, dtype)
    else:
        initial_memory = validation.array(
            "initial_memory", initial_memory, shape, "[B, H, D, E]"
        ).astype(dtype)
    return _jit_delta_rule(
        config,
        query,
        key,
        write_key,
        value,
        initial_memory,
        validation.segment_ids(segment_ids, batch, length),
    )


@functools.partial(jax.jit, static_argnums=0)
def _jit_delta_rule(config, *args):
    query, *args = numerics.varying_alike(args)
    out, memory = delta(config, query, *args)
    return out.astype(query.dtype), memory


STEP_IMPLEMENTATIONS = ("xla", "pallas")


def decode_kernel(
    implementation: str | None, state: VLAState, *tokens: Array | None
) -> Callable[..., Any] | None:
    """The kernel of one decoding step if the caller named it, None for plain ``jax.numpy``.

    Raises:
      ValueError: if ``implementation`` is none that a step has.
      NotImplementedError: if the kernel cannot serve these arrays here.
    """
    if implementation is None:
        return None
    validation.choice("implementation", implementation, STEP_IMPLEMENTATIONS)
    if implementation == "xla":
        return None
    recurrent = importlib.import_module("vla_jax.pallas.recurrent")
    dtypes = tuple(x.dtype for x in jax.tree.leaves((state, tokens)))
    recurrent.require("vla_step", dtypes, state.memory.shape[-2:])
    if any(x is None for x in (state.inverse, state.inverse_lambda0, state.inverse_age)):
        raise NotImplementedError(
            "implementation='pallas' needs a state with its cache: one that init_state, "
            "vla_attention or vla_step returned"
        )
    return recurrent.step


# --- the whole of vla_attention, for implementations that fuse it -------------------------------


@dataclasses.dataclass(frozen=True)
class Variant:
    """The static options of the recurrence (``docs/derivation.md``, variants)."""

    write_gain: str
    readout: str
    eps: float


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(config, variant, *arrays):
    return _attention_fwd(config, variant, *arrays)[0]


@_differentiated_once
def _attention_fwd(config, variant, *arrays):
    return _module(config.implementation).attention_forward(
        *arrays, policy=config.policy, variant=variant
    )


@_differentiated_once
def _attention_bwd(config, variant, residuals, cotangents):
    gradients = _module(config.implementation).attention_backward(
        residuals, cotangents, policy=config.policy, variant=variant
    )
    return *gradients, None


_attention.defvjp(_attention_fwd, _attention_bwd)


def attention(
    config: Config,
    variant: Variant,
    query: Array,
    key: Array,
    value: Array,
    direction: Array | None,
    lambda0: Array,
    memory: Array,
    penalty: Array,
    key_sum: Array,
    segment_ids: Array | None,
) -> tuple[Array, Array, Array, Array]:
    """``(out, memory, penalty, key_sum)`` of one in ``FUSED``, on validated arguments."""
    lambda0 = jnp.broadcast_to(lambda0, memory.shape[:2])
    return _attention(
        config, variant, query, key, value, direction, lambda0, memory, penalty, key_sum,
        segment_ids,
    )  # fmt: skip
