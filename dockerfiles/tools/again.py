"""Name the wheels to install once more: those that bring other files in the place of files of a wheel that they require.

``again.py SITE REQUIREMENTS`` prints their lines of REQUIREMENTS. nvidia-cutlass-dsl's for CUDA 13 is such a wheel. Without
dependencies pip has an order of its own, and may have installed the required one last.
"""

import re
import sys
from importlib.metadata import distributions
from pathlib import Path


def normal(name):
    """A distribution's name as locks have it."""
    return re.sub(r"[-_.]+", "-", name).lower()


found = {normal(one.metadata["Name"]): one for one in distributions(path=[sys.argv[1]])}
files = {name: {str(file): file.hash and file.hash.value for file in one.files} for name, one in found.items()}
for line in Path(sys.argv[2]).read_text().splitlines():
    name = normal(line.partition("==")[0])
    needs = {normal(re.match(r"[\w.-]+", text)[0]) for text in found[name].requires or () if "extra ==" not in text}
    if any(
        files[name][file] != files[need][file] for need in needs & {*found} for file in files[name].keys() & files[need].keys()
    ):
        print(line)
