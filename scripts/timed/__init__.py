"""Engines in processes of their own that are timed on the same calls."""
