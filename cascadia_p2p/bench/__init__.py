"""Measures a ring that serves many streams at once, by the protocol of the published curve."""
