"""``implementation="triton"``: the recurrence in one launch, written in Triton, through jax-triton.

The method is that of `vla_jax.pallas.recurrent`, which holds the differentiation rule; only the two
kernels differ, and they take any D and E without padding. Needs the extra ``triton``
(``pip install vla-jax[triton]``), which is imported when it is first asked for.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from vla_jax import numerics
from vla_jax.pallas import backend, recurrent
from vla_jax.types import WRITE_GAINS

NAME = "vla_triton"


@functools.cache
def _modules() -> tuple[Any, Any]:
    """``(jax_triton, the module of kernels)``."""
    try:
        import jax_triton  # type: ignore[import-not-found]

        from vla_jax import triton_kernels
    except ImportError as error:
        raise NotImplementedError(
            "implementation='triton' needs jax-triton and triton, and a JAX with GPU support "
            f"(pip install vla-jax[triton]): {error}"
        ) from error
    return jax_triton, triton_kernels


def require(dtypes, dims, chunk_size, operation: str = "vla_attention") -> None:
    """Raises NotImplementedError, saying why, where the kernels cannot serve ``operation``."""
    if operation != "vla_attention":
        raise NotImplementedError(
            "implementation='triton' is one kernel for the whole of vla_attention; for "
            f"{operation} alone use 'pallas' or 'xla'"
        )
    _modules()
    if backend.interpret():
        raise NotImplementedError(
            "implementation='triton' has no interpret mode; 'pallas' runs the same method in it"
        )
    if chunk_size is not None:
        raise NotImplementedError(
            "chunk_size must be None with implementation='triton', which goes token by token; "
            f"got {chunk_size}"
        )
    recurrent.require(NAME, dtypes, dims)


def _call(which: str, s: recurrent.Sizes, inputs, outputs, options, params):
    """One launch of the kernel named ``which``; None among ``inputs`` becomes a dummy pointer."""
    jax_triton, kernels = _modules()
    value, direction, segment_ids = inputs[2:5]
    arrays = [inputs[0] if x is None else x for x in inputs]
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outputs]
    backend.check_elements(NAME, (arrays, shapes))
    out = jax_triton.triton_call(
        *arrays,
        kernel=getattr(kernels, which),
        out_shape=shapes,
        grid=(s.streams,),
        name=f"{NAME}_{which}",
        num_warps=params["num_warps"],
        num_stages=1,
        T=s.length,
        H=s.heads,
        G=s.groups,
        DIM=s.true_dim,
        VALUE_DIM=value.shape[-1],
        D=s.dim,
        E=s.value_dim,
        BLOCK=params["rederive_every"],
        EPS=options.eps,
        GAIN=WRITE_GAINS.index(options.write_gain),
        RATIO=options.readout == "ratio",
        LEARNED=direction is not None,
        SEGMENTS=segment_ids is not None,
    )
    axes = tuple(numerics.varying_axes(arrays))
    return [jax.lax.pcast(x, axes, to="varying") for x in out] if axes else out


def forward(
    query, key, value, direction, lambda0, memory, penalty, key_sum, segment_ids,
    *, write_gain, readout, eps, params=None,
):  # fmt: skip
    """As `vla_jax.pallas.recurrent.forward`."""
    s = recurrent.sizes(query, key, value)
    params = backend.parameters(recurrent.NAME, max(s.dim, s.value_dim), params)
    per_token = key.shape[:3]
    wide = jnp.float32
    outputs = [((*query.shape[:3], value.shape[-1]), query.dtype)]
    outputs += [(x.shape, wide) for x in (memory, penalty, key_sum)]
    outputs += [(key.shape, wide), (per_token, wide), (value.shape, wide), (query.shape[:3], wide)]
    out, memory, penalty, key_sum, *saved = _call(
        "forward",
        s,
        [query, key, value, direction, segment_ids, lambda0, memory, penalty, key_sum],
        outputs,
        recurrent.Options(write_gain, readout, eps),
        params,
    )
    return out, (memory, penalty, key_sum), recurrent.Residuals(*saved)


def backward(
    residuals, query, key, value, direction, lambda0, memory, penalty, key_sum, segment_ids,
    d_out, d_memory, d_penalty, d_key_sum, *, write_gain, readout, eps, params=None,
):  # fmt: skip
    """As `vla_jax.pallas.recurrent.backward`."""
    s = recurrent.sizes(query, key, value)
    params = backend.parameters(recurrent.NAME, max(s.dim, s.value_dim), params)
    d_penalty = d_penalty + jnp.swapaxes(d_penalty, -1, -2)
    tokens = query, key, value, key if direction is None else direction
    outputs = [(x.shape, x.dtype) for x in tokens]
    scratch = penalty, residuals.residual, residuals.alpha, residuals.alpha
    scratch += residuals.weight, residuals.gain
    outputs += [(x.shape, jnp.float32) for x in (lambda0, memory, penalty, key_sum, *scratch)]
    inputs = [query, key, value, direction, segment_ids, lambda0, memory, penalty, key_sum]
    inputs += [*residuals, d_out, d_memory, d_penalty, d_key_sum]
    d_query, d_key, d_value, d_direction, *rest = _call(
        "backward", s, inputs, outputs, recurrent.Options(write_gain, readout, eps), params
    )
    d_direction = None if direction is None else d_direction
    return d_query, d_key, d_value, d_direction, *rest[:4]


# What `vla_jax.primitives` joins: the whole of ``vla_attention``.

attention_forward = functools.partial(recurrent.attention_forward, kernel=forward)
attention_backward = functools.partial(recurrent.attention_backward, kernel=backward)
