"""`python -m cascadia_p2p`: the same as the console script `cascadia-p2p`."""

from cascadia_p2p.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
