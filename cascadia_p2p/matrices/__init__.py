"""How large matrices are stored: encodings, their blocks, and the way from numbers to codes."""
