"""``python -m sm120kit``."""

from sm120kit.cli import main

main()
