"""Remove the files that an image leaves out: ``leave_out.py SITE LIST``, whose lines are ``distribution:pattern``.

Patterns are those of paths below SITE, as RECORD has them. Directories that become empty are removed as well.
"""

import re
import sys
from fnmatch import fnmatchcase
from importlib.metadata import distributions
from pathlib import Path

site = Path(sys.argv[1])
patterns = [line.split(":", 1) for line in Path(sys.argv[2]).read_text().splitlines()]
for distribution in distributions(path=[str(site)]):
    name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
    for file in distribution.files:
        if any(name == owner and fnmatchcase(str(file), pattern) for owner, pattern in patterns):
            path = site / file
            path.unlink(missing_ok=True)
            for parent in path.parents:
                if parent == site or any(parent.iterdir()):
                    break
                parent.rmdir()
