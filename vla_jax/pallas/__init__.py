"""Kernels for NVIDIA GPUs, written in Pallas: one file a primitive, ``backend`` below them all."""

from vla_jax.pallas.backend import export_checks

__all__ = ["export_checks"]
