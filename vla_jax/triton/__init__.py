"""``implementation="triton"``: the recurrence in one launch, written in Triton, through jax-triton.

A program is one head. It holds the inverse ``A`` (D×D), and then the memory ``S`` (D×E), on chip
from the first token to the last, in float32, so nothing but tokens moves: for few tokens (the
chunkwise kernels of ``"pallas"`` are as fast from about 16 on), correct for any number. Equation
numbers are those of ``docs/derivation.md``.

The backward is a second launch, four sweeps over the tokens, each with one matrix on chip, all in
closed form (equations (17) to (26) with chunks of one token):

    1  from the end    R, the cotangent of S: those of the residual and of the solution α
    2  from the start  A once more: β = A dα
    3  from the start  S once more: the cotangents that S multiplies, of the query and the unit key
    4  from the end    Σ β αᵀ + α βᵀ: the cotangent of the directions, and all of the key's

No atomics: two runs give equal bits. Nothing is kept for the backward but ``Residuals``.

Needs the extra ``triton`` (``pip install vla-jax[triton]``), which is imported when it is first
asked for. The kernels, in ``kernels.py``, take any D and E without padding.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from vla_jax import bundles, numerics
from vla_jax.bundles import Attention, AttentionOutputs
from vla_jax.pallas import common
from vla_jax.plan import Plan
from vla_jax.types import WRITE_GAINS, Array

NAME = "vla_triton"


@dataclasses.dataclass(frozen=True)
class Parameters:
    """What is chosen for a size."""

    num_warps: int
    rederive_every: int = numerics.REDERIVE_EVERY  # tokens between two derivations of the inverse


TABLE = {32: Parameters(1), 64: Parameters(4), 128: Parameters(8)}  # {largest D or E: parameters}


class Residuals(NamedTuple):
    """What the backward needs of the forward beside its inputs, float32."""

    alpha: Array  # [B, T, H, D]
    gain: Array  # [B, T, H], the write key is gain * alpha
    residual: Array  # [B, T, H, E], v − S k̂
    weight: Array  # [B, T, Hq], z·q


@functools.cache
def _modules() -> tuple[Any, Any]:
    """``(jax_triton, the module of kernels)``.

    Raises:
      ImportError: if jax-triton, Triton or a JAX with GPU support is missing.
    """
    import jax_triton  # type: ignore[import-not-found]

    from vla_jax.triton import kernels

    return jax_triton, kernels


def unsupported(bundle: Any, chunk_size: int | None) -> str | None:
    """Why the kernels cannot serve these arrays here, or None."""
    if not isinstance(bundle, Attention):
        return (
            "it is one kernel for the whole of vla_attention; for "
            f"{bundles.OPERATIONS[type(bundle)]} alone use 'pallas' or 'xla'"
        )
    try:
        _modules()
    except ImportError as error:
        return (
            "it needs jax-triton and triton, and a JAX with GPU support "
            f"(pip install vla-jax[triton]): {error}"
        )
    if common.interpret():
        return "it has no interpret mode; 'pallas' has one"
    if chunk_size is not None:
        return f"chunk_size must be None: it goes token by token; got {chunk_size}"
    tokens = bundles.tokens(bundle).values()
    dim = max(x.shape[-1] for x in tokens)
    if dim > max(TABLE):
        return f"it keeps the state on chip: head dimensions up to {max(TABLE)}, got {dim}"
    return common.unserved(tokens)


class _Call(NamedTuple):
    """The static arguments of both launches."""

    plan: Plan
    params: Parameters
    learned: bool
    segments: bool
    shape: tuple[int, ...]  # of the key
    groups: int
    value_dim: int


def _call(plan: Plan, inputs: Attention, params: Parameters | None) -> tuple[_Call, list[Array]]:
    """What is static, and the arrays as both kernels take them: a dummy for one that is absent."""
    query, key, value, direction, lambda0, memory, penalty, key_sum, segment_ids = inputs
    sizes = common.power_of_two(key.shape[-1]), common.power_of_two(value.shape[-1])
    call = _Call(
        plan,
        params or common.parameters(TABLE, max(sizes)),
        direction is not None,
        segment_ids is not None,
        key.shape,
        query.shape[2] // key.shape[2],
        value.shape[-1],
    )
    arrays = [query, key, value, direction, segment_ids, lambda0, memory, penalty, key_sum]
    return call, [query if x is None else x for x in arrays]


def _launch(which: str, call: _Call, inputs: list[Array], outputs: list[Any]) -> list[Array]:
    """One launch of the kernel named ``which``."""
    jax_triton, kernels = _modules()
    common.check_elements(NAME, (inputs, outputs))
    batch, length, heads, dim = call.shape
    variant = call.plan.variant
    out = jax_triton.triton_call(
        *inputs,
        kernel=getattr(kernels, which),
        out_shape=outputs,
        grid=(batch * heads,),
        name=f"{NAME}_{which}",
        num_warps=call.params.num_warps,
        num_stages=1,
        T=length,
        H=heads,
        G=call.groups,
        DIM=dim,
        VALUE_DIM=call.value_dim,
        D=common.power_of_two(dim),
        E=common.power_of_two(call.value_dim),
        BLOCK=call.params.rederive_every,
        EPS=variant.eps,
        GAIN=WRITE_GAINS.index(variant.write_gain),
        RATIO=variant.readout == "ratio",
        LEARNED=call.learned,
        SEGMENTS=call.segments,
    )
    axes = tuple(numerics.varying_axes(inputs))
    return [jax.lax.pcast(x, axes, to="varying") for x in out] if axes else out


def _like(x: Array, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, dtype)


def forward(
    plan: Plan, inputs: Attention, params: Parameters | None = None
) -> tuple[AttentionOutputs, Residuals]:
    """The outputs, and what ``backward`` needs.

    ``lambda0`` is ``[B, H]``; ``params=None`` means those of the table.
    """
    call, arrays = _call(plan, inputs, params)
    query, key, value = inputs.query, inputs.key, inputs.value
    wide = jnp.float32
    outputs = [jax.ShapeDtypeStruct((*query.shape[:3], value.shape[-1]), query.dtype)]
    outputs += [_like(x) for x in (inputs.memory, inputs.penalty, inputs.key_sum)]
    saved = key.shape, key.shape[:3], value.shape, query.shape[:3]
    outputs += [jax.ShapeDtypeStruct(shape, wide) for shape in saved]
    out = _launch("forward", call, arrays, outputs)
    return AttentionOutputs(*out[:4]), Residuals(*out[4:])


def backward(
    plan: Plan,
    inputs: Attention,
    saved: Residuals,
    cotangents: AttentionOutputs,
    params: Parameters | None = None,
) -> Attention:
    """Cotangents of the inputs; that of ``lambda0`` is ``[B, H]``."""
    call, arrays = _call(plan, inputs, params)
    d_penalty = cotangents.penalty + jnp.swapaxes(cotangents.penalty, -1, -2)
    tokens = inputs.query, inputs.key, inputs.value
    direction = inputs.key if inputs.direction is None else inputs.direction
    outputs = [_like(x, x.dtype) for x in (*tokens, direction)]
    scratch = inputs.penalty, saved.residual, saved.alpha, saved.alpha, saved.weight, saved.gain
    wide = inputs.lambda0, inputs.memory, inputs.penalty, inputs.key_sum, *scratch
    outputs += [_like(x) for x in wide]
    given = cotangents._replace(penalty=d_penalty)
    out = _launch("backward", call, [*arrays, *saved, *given], outputs)
    gradients = Attention(*out[:8])
    return gradients._replace(direction=None) if inputs.direction is None else gradients


RULES = {Attention: common.rule(forward, backward)}
