"""What computes a stage: frames of rows in, frames of rows out; knows weights and caches, but no network."""
