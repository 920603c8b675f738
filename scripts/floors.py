#!/usr/bin/env python3
"""Print the lowest versions that setup.cfg promises, as constraints for pip.

Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import configparser
import re
from pathlib import Path

config = configparser.ConfigParser()
config.read(Path(__file__).parents[1] / "setup.cfg")
wanted = [
    config["options"]["install_requires"],
    *(requirements for _, requirements in config["options.extras_require"].items()),
]
for line in sorted(set("\n".join(wanted).splitlines())):
    if floor := re.match(r"([\w-]+)(?:\[.*\])?>=([\w.]+)", line):
        print(f"{floor[1]}=={floor[2]}")
