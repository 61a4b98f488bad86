"""Run, check and prove code for NVIDIA SM12x GPUs where there is none: on a Hopper GPU and on a CPU."""

from pathlib import Path

RECEIPTS = Path(__file__).with_name("receipts")
"""Records of what ran, in a directory for each target."""
