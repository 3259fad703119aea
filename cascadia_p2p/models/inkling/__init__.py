"""The Inkling family: mixture-of-experts decoders with relative bias and short convolutions."""
