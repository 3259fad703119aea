"""Fuzzing of everything that reads bytes from outside: one target a decoder, and what drives them."""
