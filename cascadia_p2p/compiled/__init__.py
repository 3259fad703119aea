"""Functions compiled from Python: their cache, their threads, and vectors of float32 inside them."""
