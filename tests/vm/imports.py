"""Compares two configurations imported by riserd-configfs: imports.py FILE FILE

The order of disks, and therefore the number of each adapter, is not part of a configuration.
"""

import re
import sys


def blocks(path):
    """Returns all backends, and the lines after the backends."""
    with open(path) as file:
        text = re.sub(r"\b(fileio|iblock|rd_mcp|pscsi)_\d+:", r"\1:", file.read())
    backends, _, rest = text.partition("\ntargets:")
    return sorted(re.split(r"\n(?=  \S)", backends)), rest.splitlines()


first, second = map(blocks, sys.argv[1:])
for backend in first[0]:
    if backend not in second[0]:
        print("<", backend)
for backend in second[0]:
    if backend not in first[0]:
        print(">", backend)
if first[1] != second[1]:
    print("<", "\n< ".join(first[1]))
    print(">", "\n> ".join(second[1]))
sys.exit(first != second)
