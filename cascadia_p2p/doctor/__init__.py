"""Looks at this PC, its network and its fleet, and says what is right, what is not, and what to do."""
