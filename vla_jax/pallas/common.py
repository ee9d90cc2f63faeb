"""What all kernels share and no Pallas back end is needed for: switches, the device, limits, vmap.

``VLA_JAX_PALLAS_INTERPRET=1`` in the environment runs Pallas kernels as ordinary XLA operations on
any device: slow, for tests.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from vla_jax import partitioning
from vla_jax.implementations import Rule
from vla_jax.types import Array

INTERPRET = "VLA_JAX_PALLAS_INTERPRET"
MIN_COMPUTE_CAPABILITY = 8.0
MAX_ELEMENTS = 2**31  # kernels index with 32 bits
# Of Pallas through Triton and of jax-triton.
_CUSTOM_CALLS = ("__gpu$xla.gpu.triton", "triton_kernel_call", "triton_kernel_call_ffi")

T = TypeVar("T")


# --- where kernels can run ---------------------------------------------------------------------


def interpret() -> bool:
    """Whether kernels run in Pallas' interpreter instead of being compiled."""
    return os.environ.get(INTERPRET, "0") not in ("", "0")


def gpu() -> Any:
    """The GPU that arrays are placed on by default, or None."""
    try:
        device = jax.local_devices(backend="gpu")[0]
    except RuntimeError:
        return None
    return device if "cuda" in getattr(device.client, "platform_version", "cuda").lower() else None


def unavailable() -> str | None:
    """Why compiled kernels cannot run here; None if they can, or are interpreted."""
    if interpret():
        return None
    device = gpu()
    if device is None:
        return f"no NVIDIA GPU is visible to JAX (set {INTERPRET}=1 to interpret the kernels)"
    capability = float(device.compute_capability)
    if capability < MIN_COMPUTE_CAPABILITY:
        return f"compute capability {capability} is older than {MIN_COMPUTE_CAPABILITY}"
    return None


def unserved(arrays: Iterable[Any]) -> str | None:
    """Why kernels cannot take arrays of these dtypes, or cannot run here; or None."""
    for x in arrays:
        if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            return f"inputs are {x.dtype.name}; float32, bfloat16 and float16 are served"
    return unavailable()


def parameters(table: Mapping[int, T], dim: int) -> T:
    """The entry of a table {largest D: parameters} with the smallest D that suffices.

    Raises:
      NotImplementedError: if none does.
    """
    fits = [d for d in table if d >= dim]
    if not fits:
        raise NotImplementedError(f"a head dimension of {dim} is above {max(table)}")
    return table[min(fits)]


def check_elements(name: str, arrays: Any) -> None:
    """Raises NotImplementedError if an array of the tree is too large for 32-bit indices."""
    for x in jax.tree.leaves(arrays):
        if math.prod(x.shape) >= MAX_ELEMENTS:
            raise NotImplementedError(
                f"{name}: an array of shape {list(x.shape)} has 2**31 elements or more; "
                "split the batch"
            )


def power_of_two(n: int, least: int = 16) -> int:
    """The smallest power of two that is at least ``n`` and ``least``."""
    return max(least, 1 << (n - 1).bit_length())


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """What ``jax.export`` must be told to serialise a program with these kernels.

    Their custom calls hold Triton code, of which JAX does not promise that another version of
    jaxlib reads it: export and load with the same one. Pass the list as ``disabled_checks``.
    """
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in _CUSTOM_CALLS]


# --- rules -------------------------------------------------------------------------------------


def rule(forward: Callable[..., Any], backward: Callable[..., Any] | None = None) -> Rule:
    """The rule of an implementation whose kernels have the batch for the first axis of all arrays.

    ``lambda0`` goes in, and its cotangent comes out, as ``[B, H]``; a ``vmap`` folds into the batch
    instead of adding a loop over launches, and several devices share batch and heads among them
    (``partitioning.spread`` says what this asks of the arrays saved).

    Args:
      forward, backward: as ``Rule``'s, but for ``lambda0``.
    """

    def run(plan, inputs):
        pushed = fold_batch(partitioning.spread(functools.partial(forward, plan)))
        return pushed(_per_batch(inputs))

    def pull(plan, inputs, saved, cotangents):
        pulled = fold_batch(partitioning.spread(functools.partial(backward, plan)))
        gradients = pulled(_per_batch(inputs), saved, cotangents)
        if "lambda0" in gradients._fields:
            gradients = gradients._replace(lambda0=jnp.sum(gradients.lambda0, axis=0))
        return gradients

    return Rule(run, None if backward is None else pull)


def _per_batch(inputs: Any) -> Any:
    if "lambda0" not in inputs._fields:
        return inputs
    lambda0 = inputs.lambda0
    return inputs._replace(lambda0=jnp.broadcast_to(lambda0, (inputs[0].shape[0], *lambda0.shape)))


def fold_batch(function: Callable) -> Callable:
    """``function`` of trees of arrays that all have a batch axis first; ``vmap`` folds into it."""
    folded = jax.custom_batching.custom_vmap(function)

    @folded.def_vmap
    def mapped(axis_size, in_batched, *args):
        behind = partitioning.several()  # the axis: before a sharded batch it would gather it

        def fold(x: Array, batched: bool) -> Array:
            if not batched:
                x = jnp.broadcast_to(x, (axis_size, *x.shape))
            x = jnp.swapaxes(x, 0, 1) if behind else x
            return x.reshape(-1, *x.shape[2:])

        def unfold(x: Array) -> Array:
            if behind:
                return jnp.swapaxes(x.reshape(-1, axis_size, *x.shape[1:]), 0, 1)
            return x.reshape(axis_size, -1, *x.shape[1:])

        out = jax.tree.map(unfold, folded(*jax.tree.map(fold, args, tuple(in_batched))))
        return out, jax.tree.map(lambda _: True, out)

    return folded
