"""Engines in processes of their own, timed on the same calls by `bench_reference.py` and `bench_smollm.py`."""
