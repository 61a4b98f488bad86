"""``sm120kit`` and ``python -m sm120kit``."""

import signal


def main() -> None:
    """Run the command line. Ctrl-C during its imports ends the process without a traceback: there is nothing to clean up."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from sm120kit import cli

    cli.main()


if __name__ == "__main__":
    main()
