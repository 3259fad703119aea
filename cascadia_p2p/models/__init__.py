"""Model families: each knows its config, its checkpoints' names and its layers' arithmetic."""
