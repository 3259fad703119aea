"""`python -m cascadia_p2p`: the same as the console script `cascadia-p2p`."""


def start() -> int:
    """Run a command and return its exit code, also where Ctrl-C comes while Python still reads modules."""
    try:
        from cascadia_p2p.cli import main
    except KeyboardInterrupt:
        return 130
    return main()


if __name__ == "__main__":
    raise SystemExit(start())
