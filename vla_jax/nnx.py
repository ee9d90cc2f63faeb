"""Variational Linear Attention as a Flax NNX layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen, nnx

from vla_jax import layer, numerics, validation
from vla_jax.layer import FeatureMap, Initializer, LayerConfig, LayerState
from vla_jax.types import (
    Array,
    DTypeLike,
    Implementation,
    Inverse,
    PrecisionLike,
    Readout,
    WriteGain,
)

__all__ = ["LayerState", "VariationalLinearAttention"]


class VariationalLinearAttention(nnx.Module):
    """Causal self-attention with a recurrent memory, linear in the sequence length.

    Parameters (``q_proj.kernel`` and so on) have the names and shapes that
    ``vla_jax.layer.parameters`` lists, the same as in ``vla_jax.linen``.

    Args:
      num_heads, in_features: see ``vla_jax.layer.LayerConfig``, which documents every option.
      logical_axes: with True or a mapping every parameter carries logical axis names
        (``out_sharding``), for ``nnx.get_partition_spec`` under ``nnx.logical_axis_rules``. Created
        with such rules and a mesh (``jax.set_mesh``) in force, it is sharded at once, the way Flax
        does it; without a mesh the names are only metadata.
      rngs: the ``params`` stream initialises the parameters.

    Raises:
      ValueError, TypeError: naming the option that is wrong.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        out_features: int | None = None,
        lambda0: Any = None,
        learn_lambda0: bool = False,
        direction: Literal["learned", "key"] = "learned",
        write_gain: WriteGain | None = None,
        readout: Readout | None = None,
        inverse: Inverse = "write",
        beta: bool = False,
        decay: bool = False,
        feature_map: FeatureMap = numerics.feature_map,
        short_conv: int | None = None,
        output_norm: Literal["layer", "rms_per_head"] | None = "layer",
        norm_eps: float = 1e-5,
        use_bias: bool = True,
        dtype: DTypeLike = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = layer.default_kernel_init,
        bias_init: Initializer = layer.default_bias_init,
        implementation: Implementation | None = None,
        check_invariants: bool = False,
        logical_axes: bool | Mapping[str, str | None] = False,
        rngs: nnx.Rngs,
    ):
        config = LayerConfig(**layer.options(locals()))
        validation.instance("rngs", rngs, nnx.Rngs)
        self.config = config.without_initializers()
        declare(self, config, rngs, _metadata if config.logical_axes else None)

    def __call__(
        self,
        x: Array,
        *,
        mask: Array | None = None,
        segment_ids: Array | None = None,
        initial_state: LayerState | None = None,
        return_state: bool = False,
        axis_name: str | None = None,
    ) -> Any:
        """Applies the layer to ``x [B, T, in_features]``; see ``vla_jax.layer.apply``."""
        return layer.apply(
            self.config,
            declared(self),
            x,
            mask=mask,
            segment_ids=segment_ids,
            initial_state=initial_state,
            return_state=return_state,
            axis_name=axis_name,
        )

    def init_state(self, batch_size: int) -> LayerState:
        """The state of ``batch_size`` fresh sequences, for ``step`` and ``initial_state``."""
        return layer.init_state(self.config, batch_size)

    def step(self, x_t: Array, state: LayerState) -> tuple[Array, LayerState]:
        """One token, ``x_t [B, in_features]``: ``(out [B, out_features], state)``."""
        return layer.step(self.config, declared(self), x_t, state)


def declare(
    module: nnx.Module,
    config: LayerConfig,
    rngs: nnx.Rngs,
    metadata: Callable[[layer.Parameter], dict[str, Any]] | None = None,
) -> None:
    """Draws the parameters of ``config`` as attributes of ``module``, one ``nnx.Dict`` a group."""
    for group, members in layer.parameters(config).items():
        values = {
            name: nnx.Param(
                p.init(rngs.params(), config.param_dtype), **(metadata(p) if metadata else {})
            )
            for name, p in members.items()
        }
        setattr(module, group, nnx.Dict(values))


def declared(module: Any) -> layer.Parameters:
    """The parameters that ``declare`` made, as ``layer.apply`` takes them."""
    return {
        group: {name: getattr(module, group)[name][...] for name in members}
        for group, members in layer.parameters(module.config).items()
    }


def _metadata(parameter: layer.Parameter) -> dict[str, Any]:
    # Eager sharding needs a mesh and rules that map these names to it; flax raises without.
    mesh = jax.sharding.get_abstract_mesh()
    eager = nnx.using_eager_sharding() and not mesh.empty
    eager = eager and bool(linen.get_logical_axis_rules())
    return {"out_sharding": parameter.axes, "eager_sharding": eager}
