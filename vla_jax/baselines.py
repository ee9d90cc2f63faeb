"""What VLA is compared with: other causal mixers with the signature of ``vla_attention``.

All take ``query [B, T, Hq, D]``, ``key [B, T, H, D]`` and ``value [B, T, H, E]`` (Hq a multiple of
H), feature-mapped by the caller, with ``segment_ids`` and ``mask`` as in ``vla_attention``, and all
but softmax, which has no state of constant size, go on from ``initial_state`` and return theirs::

    function            recurrence (k̂ = k / ‖k‖)                                      state a head
    softmax_attention   o = Σ softmax(q·k / √D) v                                     T (D + E)
    linear_attention    S ← S + v kᵀ, z ← z + k, o = S q / z·q                        D E + D
    delta_net           S ← S + β (v − S k̂) k̂ᵀ, o = S q                               D E
    gated_delta_net     S ← a S + β (v − a S k̂) k̂ᵀ, o = S q                           D E
    mesa_net            S ← a S + β v k̂ᵀ, H ← a H + β k̂ k̂ᵀ, o = S (λ₀ I + H)⁻¹ q      D E + D²
    published_deltanet  S ← diag(g) S + (v − S k̂) k̂ᵀ, z ← z + k, o = S q / z·q        D E + D
    identity_attention  VLA with A ≡ I: S ← S + (v − S k̂) k̂ᵀ, z ← z + k, o = S q/z·q  D E + D

All but softmax and ``published_deltanet`` are compositions of ``penalty_solve`` and ``delta_rule``,
and so have their implementations, chunkwise form and closed-form gradients.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from vla_jax import chunks, meshes, numerics, primitives, validation
from vla_jax import plan as planning
from vla_jax.bundles import AXES
from vla_jax.types import (
    READOUTS,
    Array,
    ArrayLike,
    Arrays,
    Implementation,
    PrecisionLike,
    Readout,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class BaselineState(Arrays):
    """What a baseline carries from token to token, float32 (float64 with float64 inputs).

    Attributes:
      memory: ``[B, H, D, E]``, ``Sᵀ``, key dimension first.
      key_sum: ``[B, H, D]``, ``z``; None where the read-out has no ratio.
      penalty: ``[B, H, D, D]``, ``H`` of ``mesa_net`` without the ``lambda0`` term; None elsewhere.
    """

    memory: Array
    key_sum: Array | None = None
    penalty: Array | None = None


@dataclasses.dataclass(frozen=True)
class _Tokens:
    """Validated arguments; query, key and value are zero where a token is absent."""

    query: Array
    key: Array
    value: Array
    segment_ids: Array | None
    present: Array | None  # [B, T, 1]
    mask: Any  # as given

    @property
    def unit_key(self) -> Array:
        """``k̂ [B, T, H, D]``, wide: in 16 bits it would be longer than 1, and ``β = 2`` diverge."""
        return numerics.normalize(self.key.astype(self.dtype))

    @property
    def dtype(self) -> Any:
        """Of the state."""
        return numerics.accumulator_dtype(self.query.dtype, self.key.dtype, self.value.dtype)

    def per_token(self, name: str, x: Any, axes: str = "[B, T, H]", absent: float = 0) -> Array:
        """A gate ``[B, T, H]`` (or ``[B, T, H, E]``), wide, ``absent`` where the token is."""
        shape = self.value.shape if axes.endswith("E]") else self.value.shape[:3]
        x = validation.array(name, x, shape, axes).astype(self.dtype)
        if self.present is None:
            return x
        present = self.present if x.ndim == 3 else self.present[..., None]
        return jnp.where(present, x, absent)

    def gate(self, name: str, x: Any) -> Array | None:
        """``beta`` or ``log_decay``, wide, 0 where the token is absent; None stays so.

        Raises:
          ValueError, TypeError: naming it; of its values where they are concrete.
        """
        if x is None:
            return None
        wide = self.per_token(name, x)
        validation.gate_values(name, x, self.mask)
        return wide

    def initial(self, state: Any, *optional: str) -> BaselineState:
        """The state to start from, with the ``optional`` fields and no other."""
        batch, _, heads, dim = self.key.shape
        shapes = {
            "memory": ((batch, heads, dim, self.value.shape[-1]), "[B, H, D, E]"),
            "key_sum": ((batch, heads, dim), "[B, H, D]"),
            "penalty": ((batch, heads, dim, dim), "[B, H, D, D]"),
        }
        if not isinstance(state, BaselineState | None):
            raise TypeError(
                f"initial_state must be a BaselineState or None, got {type(state).__name__}"
            )
        fields = {}
        for name in ("memory", *optional):
            x = jnp.zeros(shapes[name][0])
            if state is not None:
                x = validation.array(f"initial_state.{name}", getattr(state, name), *shapes[name])
            fields[name] = x.astype(self.dtype)
        tokens = self.query, self.key, self.value
        return BaselineState(**numerics.varying_alike((tokens, fields))[1])


def _tokens(query: Any, key: Any, value: Any, segment_ids: Any, mask: Any) -> _Tokens:
    sizes, given = planning.Sizes(), mask
    query, key, value = planning.tokens_of(sizes, query=query, key=key, value=value)
    segment_ids, mask = validation.segments(segment_ids, mask, sizes["B"], sizes["T"])
    query, key, value, segment_ids, mask = numerics.varying_alike(
        (query, key, value, segment_ids, mask)
    )
    query, key, value = (numerics.masked(x, mask) for x in (query, key, value))
    present = None if mask is None else mask[..., None]
    return _Tokens(query, key, value, segment_ids, present, given)


def _ratio(out: Array, t: _Tokens, key_sum: Array, eps: float) -> tuple[Array, Array]:
    """``out / max(z·q, eps)`` and the last ``z``."""
    policy = numerics.policy(t.query.astype(t.dtype))
    key_sums, key_sum = chunks.causal_sum(t.key.astype(t.dtype), key_sum, t.segment_ids, policy)
    grouped = numerics.grouped(t.query, t.key.shape[2]).astype(t.dtype)
    weight = jnp.sum(grouped * key_sums[:, :, :, None], axis=-1).reshape(t.query.shape[:3])
    return out / jnp.maximum(weight, eps)[..., None], key_sum


def _finish(
    out: Array, t: _Tokens, state: BaselineState, readout: str, eps: float, return_state: bool
) -> Any:
    """The ratio where it is asked for, the dtype of the query, and the state."""
    validation.flag("return_state", return_state)
    if readout == "ratio":
        out, key_sum = _ratio(out.astype(t.dtype), t, state.key_sum, eps)
        state = dataclasses.replace(state, key_sum=key_sum)
    out = out.astype(t.query.dtype)
    return (out, state) if return_state else out


def _readout(readout: Any, eps: Any, t: _Tokens) -> tuple[str, ...]:
    """Checks the options; the optional state field that the read-out needs."""
    validation.choice("readout", readout, READOUTS)
    validation.floor("eps", eps, t.dtype)
    return ("key_sum",) if readout == "ratio" else ()


@meshes.explicit(AXES["out"])
@numerics.broadcasts
def softmax_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    segment_ids: Array | None = None,
    mask: Array | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
) -> Array:
    """Causal softmax attention through ``jax.nn.dot_product_attention``.

    Args:
      query, key, value, segment_ids, mask: as in ``vla_attention``.
      implementation: of ``jax.nn.dot_product_attention``.

    Returns:
      ``[B, T, Hq, E]`` in the dtype of ``query``; 0 where a token is absent.

    Raises:
      ValueError, TypeError: for a bad argument, which the message names.
    """
    t = _tokens(query, key, value, segment_ids, mask)
    seen = None
    if t.segment_ids is not None:
        seen = (t.segment_ids[:, :, None] == t.segment_ids[:, None, :])[:, None]
    if t.present is not None:
        columns = t.present[:, None, None, :, 0]
        seen = columns if seen is None else seen & columns
    dim, value_dim = key.shape[-1], value.shape[-1]
    pad = max(dim, value_dim)  # dot_product_attention has one size for both
    q, k, v = (
        jnp.pad(x, [(0, 0)] * 3 + [(0, pad - x.shape[-1])]).astype(query.dtype)
        for x in (t.query, t.key, t.value)
    )
    out = jax.nn.dot_product_attention(
        q, k, v, mask=seen, is_causal=True, scale=dim**-0.5, implementation=implementation
    )[..., :value_dim]
    return out if t.present is None else jnp.where(t.present[..., None], out, 0)


@meshes.explicit(AXES["out"])
@numerics.broadcasts
def linear_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    initial_state: BaselineState | None = None,
    segment_ids: Array | None = None,
    mask: Array | None = None,
    readout: Readout = "ratio",
    eps: float = 1e-6,
    chunk_size: int | None = None,
    implementation: Implementation | None = None,
    precision: PrecisionLike = None,
    return_state: bool = False,
) -> Any:
    """Linear attention (Katharopoulos et al., 2020): the delta rule that corrects nothing.

    Args, returns, raises: as ``vla_attention``, with a ``BaselineState`` (memory, key_sum).
    """
    t = _tokens(query, key, value, segment_ids, mask)
    state = t.initial(initial_state, *_readout(readout, eps, t))
    out, memory = primitives.delta_rule(
        t.query, jnp.zeros_like(t.key), t.key, t.value,
        initial_memory=state.memory, segment_ids=t.segment_ids,
        chunk_size=chunk_size, implementation=implementation, precision=precision,
    )  # fmt: skip
    return _finish(out, t, dataclasses.replace(state, memory=memory), readout, eps, return_state)


@meshes.explicit(AXES["out"])
@numerics.broadcasts
def delta_net(
    query: Array,
    key: Array,
    value: Array,
    beta: Array | None = None,
    *,
    initial_state: BaselineState | None = None,
    segment_ids: Array | None = None,
    mask: Array | None = None,
    readout: Readout = "none",
    eps: float = 1e-6,
    chunk_size: int | None = None,
    implementation: Implementation | None = None,
    precision: PrecisionLike = None,
    return_state: bool = False,
) -> Any:
    """DeltaNet (Yang et al., 2024): ``delta_rule`` with unit keys and the write key ``β k̂``.

    Args:
      query, key, value: as in ``vla_attention``; the keys are normalised inside, the queries not.
      beta: ``[B, T, H]``, the share of the old value that a write replaces; None for 1.
      initial_state, segment_ids, mask, readout, eps, chunk_size, implementation, precision,
        return_state: as in ``vla_attention``.

    Returns:
      ``out [B, T, Hq, E]`` in the dtype of ``query``, or ``(out, BaselineState)``.

    Raises:
      As ``vla_attention``.
    """
    return gated_delta_net(
        query, key, value, beta, initial_state=initial_state, segment_ids=segment_ids, mask=mask,
        readout=readout, eps=eps, chunk_size=chunk_size, implementation=implementation,
        precision=precision, return_state=return_state,
    )  # fmt: skip


@meshes.explicit(AXES["out"])
def identity_attention(query: Array, key: Array, value: Array, **options: Any) -> Any:
    """VLA with ``A ≡ I``: everything as published, the write direction ``α̂ = k̂``.

    Args, returns, raises: as ``delta_net`` without ``beta``; the read-out is the ratio by default.
    """
    return delta_net(query, key, value, **({"readout": "ratio"} | options))


@meshes.explicit(AXES["out"])
@numerics.broadcasts
def mesa_net(
    query: Array,
    key: Array,
    value: Array,
    beta: Array | None = None,
    log_decay: Array | None = None,
    *,
    lambda0: ArrayLike = 1.0,
    initial_state: BaselineState | None = None,
    segment_ids: Array | None = None,
    mask: Array | None = None,
    chunk_size: int | None = None,
    implementation: Implementation | None = None,
    precision: PrecisionLike = None,
    return_state: bool = False,
) -> Any:
    """The ridge regression that MesaNet (von Oswald et al., 2025) approximates, solved exactly.

    The read-out at ``t`` is ``W q`` with ``W`` minimising
    ``Σ_{s≤t} Γ_ts β_s ‖v_s − W k̂_s‖² + λ₀ ‖W‖²``, ``Γ_ts`` the decay from ``s`` to ``t``:
    ``penalty_solve`` with the queries, then linear attention on the solution. MesaNet's penalty for
    each channel is left out.

    Args:
      query, key, value: as in ``vla_attention``; the keys are normalised inside.
      beta: ``[B, T, H]``, weights of the tokens, finite and not negative, checked where concrete;
        None for 1.
      log_decay: ``[B, T, H]``, finite and not positive, checked where concrete; None for 0.
      lambda0: scalar or ``[H]``, positive.
      initial_state, segment_ids, mask, chunk_size, implementation, precision, return_state: as in
        ``vla_attention``.

    Returns:
      ``out [B, T, Hq, E]`` in the dtype of ``query``, or ``(out, BaselineState)`` (memory,
      penalty).

    Raises:
      As ``vla_attention``.
    """
    t = _tokens(query, key, value, segment_ids, mask)
    state = t.initial(initial_state, "penalty")
    unit_key, beta = t.unit_key, t.gate("beta", beta)
    options: dict[str, Any] = {
        "log_decay": t.gate("log_decay", log_decay),
        "segment_ids": t.segment_ids,
        "chunk_size": chunk_size,
        "implementation": implementation,
        "precision": precision,
    }
    solution, penalty = primitives.penalty_solve(
        t.query.astype(t.dtype), unit_key,
        lambda0=lambda0, weight=beta, initial_penalty=state.penalty, **options,
    )  # fmt: skip
    out, memory = primitives.delta_rule(
        solution, jnp.zeros_like(unit_key), numerics.weighted(unit_key, beta), t.value,
        initial_memory=state.memory, **options,
    )  # fmt: skip
    return _finish(out, t, BaselineState(memory, penalty=penalty), "none", 1, return_state)


@meshes.explicit(AXES["out"])
@numerics.broadcasts
def gated_delta_net(
    query: Array,
    key: Array,
    value: Array,
    beta: Array | None = None,
    log_decay: Array | None = None,
    *,
    initial_state: BaselineState | None = None,
    segment_ids: Array | None = None,
    mask: Array | None = None,
    readout: Readout = "none",
    eps: float = 1e-6,
    chunk_size: int | None = None,
    implementation: Implementation | None = None,
    precision: PrecisionLike = None,
    return_state: bool = False,
) -> Any:
    """Gated DeltaNet (Yang et al., 2025): ``S ← a S + β (v − a S k̂) k̂ᵀ``, ``o = S q``.

    Args:
      query, key, value: as in ``vla_attention``; the keys are normalised inside.
      beta: ``[B, T, H]``, finite and not negative, checked where concrete; None for 1.
      log_decay: ``[B, T, H]``, finite and not positive, checked where concrete: the logarithm of
        ``a``. None for 0.
      initial_state, segment_ids, mask, readout, eps, chunk_size, implementation, precision,
        return_state: as in ``vla_attention``; the key sum of the ratio does not decay.

    Returns:
      ``out [B, T, Hq, E]`` in the dtype of ``query``, or ``(out, BaselineState)``.

    Raises:
      As ``vla_attention``.
    """
    t = _tokens(query, key, value, segment_ids, mask)
    state = t.initial(initial_state, *_readout(readout, eps, t))
    out, memory = primitives.unit_delta_rule(
        t.query, t.key, t.value, t.gate("beta", beta),
        log_decay=t.gate("log_decay", log_decay), initial_memory=state.memory,
        segment_ids=t.segment_ids, chunk_size=chunk_size, implementation=implementation,
        precision=precision,
    )  # fmt: skip
    return _finish(out, t, dataclasses.replace(state, memory=memory), readout, eps, return_state)


@meshes.explicit(AXES["out"])
@numerics.broadcasts
def published_deltanet(
    query: Array,
    key: Array,
    value: Array,
    gate: Array,
    *,
    initial_state: BaselineState | None = None,
    segment_ids: Array | None = None,
    mask: Array | None = None,
    readout: Readout = "ratio",
    eps: float = 1e-6,
    return_state: bool = False,
) -> Any:
    """The arm that the VLA paper compares with and calls DeltaNet: ``diag(g) S + (v − S k̂) k̂ᵀ``.

    It is not DeltaNet: every channel of the memory decays at every token by a gate of its own, with
    which the correction ``S k̂`` does not agree. It is here to reproduce the published figures. A
    decay for each channel of the value needs one triangular system for each, so there is no
    chunkwise form that pays: this is a scan over the tokens.

    Args:
      query, key, value: as in ``vla_attention``; the keys are normalised inside (unnormalised keys
        of the published feature map make the recurrence diverge).
      gate: ``[B, T, H, E]``, the ``g`` of each channel of the value, between 0 and 1, checked where
        concrete.
      initial_state, segment_ids, mask, readout, eps, return_state: as in ``vla_attention``.

    Returns:
      ``out [B, T, Hq, E]`` in the dtype of ``query``, or ``(out, BaselineState)``.

    Raises:
      ValueError, TypeError: for a bad argument, which the message names.
    """
    t = _tokens(query, key, value, segment_ids, mask)
    state = t.initial(initial_state, *_readout(readout, eps, t))
    given, gate = gate, t.per_token("gate", gate, "[B, T, H, E]", absent=1)
    validation.gate_values("gate", given, mask)
    unit_key = t.unit_key
    arguments = (t.query, unit_key, unit_key, t.value, gate, state.memory)
    out, memory = _channel_scan(*numerics.varying_alike(arguments), t.segment_ids)
    return _finish(out, t, dataclasses.replace(state, memory=memory), readout, eps, return_state)


@jax.jit
def _channel_scan(query, key, write_key, value, decay, memory, segment_ids):
    """Token by token: after ``S k`` the memory decays by ``decay [B, T, H, E]``."""
    dtype = memory.dtype

    def step(memory, token):
        q, k, a, v, g, start = token
        memory = jnp.where(start[:, None, None, None], 0, memory)
        residual = v - jnp.einsum("bhde,bhd->bhe", memory, k, precision=_HIGHEST)
        memory = g[..., None, :] * memory + a[..., :, None] * residual[..., None, :]
        return memory, jnp.einsum("bhgd,bhde->bhge", q, memory, precision=_HIGHEST)

    batch, length, heads, _ = key.shape
    start = jnp.zeros((batch, length), bool)
    if segment_ids is not None:
        start = start.at[:, 1:].set(segment_ids[:, 1:] != segment_ids[:, :-1])
    wide = (numerics.grouped(query, heads), key, write_key, value, decay)
    tokens = (*(jnp.moveaxis(x.astype(dtype), 1, 0) for x in wide), start.T)
    memory, out = jax.lax.scan(step, memory, tokens, unroll=4)
    return jnp.moveaxis(out, 0, 1).reshape(*query.shape[:3], -1), memory


_HIGHEST = jax.lax.Precision.HIGHEST
