"""The commands of the laboratory by their path in ``sm120kit``; each is imported when it is chosen."""

from __future__ import annotations

from sm120kit.cli.tree import Branch, Leaf

PROVE = ("patch", "prove")
KERNELS, PTX, RUN = ("verify", "kernels"), ("verify", "ptx"), ("verify", "run")

COMMANDS = {
    leaf.path: leaf
    for leaf in (
        Leaf("sm12x_lab.cli.patch_proof:prove", "Show the effects of a patch: compile its probes with and without it", PROVE),
        Leaf(
            "sm12x_lab.cli.verify_kernels:verify_kernels",
            "Compare kernels on a GPU with an integer reference, bit for bit",
            KERNELS,
        ),
        Leaf("sm12x_lab.cli.verify_ptx:verify_ptx", "Rewrite PTX for SM120 so that a Hopper GPU can run it", PTX),
        Leaf("sm12x_lab.cli.verify_run:verify_run", "Run a program for SM120 on a Hopper GPU", RUN),
    )
}
"""What the entry point ``sm120kit.commands`` names."""

OWN = Branch(
    "Run, check and prove code for NVIDIA SM12x GPUs where there is none",
    {path[-1]: COMMANDS[path] for path in (RUN, PTX, KERNELS, PROVE)},
)
"""The program ``sm12x-lab``."""
