"""Kernels compiled from Python: everything of a layer that is not a large matrix."""
