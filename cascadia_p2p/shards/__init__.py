"""The exported model on disk: how it is written from a checkpoint, checked, and read."""
