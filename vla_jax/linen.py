"""Variational Linear Attention as a Flax Linen layer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen

from vla_jax import functions, layer, numerics
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


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Constant:
    """A Python value that no transformation traces."""

    value: bool | str

    def __bool__(self) -> bool:
        return bool(self.value)


def _shown(option: Any) -> Any:
    return option.value if isinstance(option, _Constant) else option


class VariationalLinearAttention(linen.Module):
    """Causal self-attention with a recurrent memory, linear in the sequence length.

    Parameters (``q_proj/kernel`` and so on) have the names and shapes that
    ``vla_jax.layer.parameters`` lists, the same as in ``vla_jax.nnx``.

    Attributes:
      num_heads, in_features: see ``vla_jax.layer.LayerConfig``, which documents every option.
      logical_axes: with True or a mapping ``init`` returns the parameters boxed with logical axis
        names (``linen.with_logical_partitioning``), for ``linen.get_partition_spec`` and
        ``linen.logical_axis_rules``; ``linen.unbox`` removes the boxes. Using the layer needs
        neither a mesh nor rules, with or without boxes.

    Raises:
      ValueError, TypeError: at construction, naming the option that is wrong.
    """

    num_heads: int
    in_features: int
    _: dataclasses.KW_ONLY
    num_kv_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    out_features: int | None = None
    lambda0: Any = None
    learn_lambda0: bool = False
    direction: Literal["learned", "key"] = "learned"
    write_gain: WriteGain | None = None
    readout: Readout | None = None
    inverse: Inverse = "write"
    beta: bool = False
    decay: bool = False
    feature_map: FeatureMap = numerics.feature_map
    short_conv: int | None = None
    output_norm: Literal["layer", "rms_per_head"] | None = "layer"
    norm_eps: float = 1e-5
    use_bias: bool = True
    dtype: DTypeLike = None
    param_dtype: DTypeLike = jnp.float32
    precision: PrecisionLike = None
    kernel_init: Initializer = layer.default_kernel_init
    bias_init: Initializer = layer.default_bias_init
    implementation: Implementation | None = None
    check_invariants: bool = False
    logical_axes: bool | Mapping[str, str | None] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.config  # noqa: B018  validates the options

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keeps what is no array out of the sight of ``linen.remat`` and ``linen.jit``.

        They make a subclass whose call traces every keyword argument, ``return_state`` too.
        """
        super().__init_subclass__(**kwargs)
        if (call := cls.__dict__.get("__call__")) is not None:

            @functools.wraps(call)
            def hiding(self, *args, **options):
                for name in {"return_state", "axis_name"} & options.keys():
                    if isinstance(options[name], bool | str):
                        options[name] = _Constant(options[name])
                return call(self, *args, **options)

            cls.__call__ = hiding  # type: ignore[method-assign]

    @linen.nowrap
    def __getstate__(self) -> dict[str, Any]:
        return functions.by_name(self.__dict__)

    @linen.nowrap
    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(functions.from_names(state))

    @property
    def config(self) -> LayerConfig:
        """The options, validated."""
        return LayerConfig(**{name: getattr(self, name) for name in layer.OPTIONS})

    def setup(self) -> None:
        """Declares the parameters."""
        config = self.config

        def init_group(rng, members):
            keys = jax.random.split(rng, len(members))
            group = {}
            for key, (name, p) in zip(keys, members.items(), strict=True):
                init = p.init
                if config.logical_axes:
                    init = linen.with_logical_partitioning(init, p.axes)
                group[name] = init(key, config.param_dtype)
            return group

        self._parameters = {
            group: self.param(group, init_group, members)
            for group, members in layer.parameters(config).items()
        }

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
            self._parameters,
            x,
            mask=mask,
            segment_ids=segment_ids,
            initial_state=initial_state,
            return_state=_shown(return_state),
            axis_name=_shown(axis_name),
        )

    @linen.nowrap
    def init_state(self, batch_size: int) -> LayerState:
        """The state of ``batch_size`` fresh sequences; needs no parameters and no ``apply``."""
        return layer.init_state(self.config, batch_size)

    def step(self, x_t: Array, state: LayerState) -> tuple[Array, LayerState]:
        """One token, ``x_t [B, in_features]``: ``(out [B, out_features], state)``.

        Call it through ``layer.apply(variables, x_t, state, method="step")``.
        """
        return layer.step(self.config, self._parameters, x_t, state)
