"""Kernels for Hopper GPUs, through Pallas Mosaic GPU."""
