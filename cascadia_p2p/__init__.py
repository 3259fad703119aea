"""Pool the PCs of one LAN into a ring that runs a language model too large for any one of them."""

__all__ = ["__version__"]

__version__ = "0.1.0"
