"""Variational Linear Attention in JAX: exact, chunkwise, linear in the sequence length."""

from vla_jax.numerics import feature_map
from vla_jax.ops import init_state, vla_attention, vla_step
from vla_jax.primitives import delta_rule, penalty_solve
from vla_jax.types import VLAState

__version__ = "0.1.0"

__all__ = [
    "VLAState",
    "delta_rule",
    "feature_map",
    "init_state",
    "penalty_solve",
    "vla_attention",
    "vla_step",
]
