"""Analyse and test device code: tiles, emulation on the CPU, verification on a GPU, and the cubins in a file."""
