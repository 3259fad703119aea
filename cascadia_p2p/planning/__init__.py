"""Splits a model over PCs and predicts its speed: sizes in, plan out; no file, no socket, no clock."""
