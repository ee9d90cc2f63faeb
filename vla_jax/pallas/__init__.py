"""Kernels for NVIDIA GPUs, written in Pallas: one file a primitive, ``backend`` below them all."""
