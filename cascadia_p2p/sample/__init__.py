"""Small Inkling checkpoints made from a seed: for the demo, for tests, and to compare with the reference."""
