"""Reads and writes all files of LIO's tree, and compares the responses of two trees.

attributes.py ask ROOT NAME=WORD … -- DIRECTORY …
    Prints a line for each response: path, operation and result. Each WORD is replaced by NAME.
attributes.py compare LIO RISERD ALLOWED
    Prints all differences. ALLOWED contains lines with "NUMBER PATTERN => ANSWER -- reason": PATTERN is
    searched in the path with the operation, ANSWER must match the start of the response from riserd, and
    NUMBER is the number of these differences. Any other difference or number is an error.
"""

import errno
import os
import re
import stat
import sys

# Values to write to each writable file.
VALUES = ["0\n", "1\n", "2", "3", "-1", "0x10", "1 ", "512", "1024", "4096", "70000", "4294967296",
          "Yes", "No", "off", "CRC32C", "None", "NULL", "a word of some length", "x" * 300]

# Files that are not tested, because they affect other objects, or depend on the host. Linux 6.12
# crashes if the access state of a device is changed that was temporarily not in any group of
# logical units.
UNTRIED = {"dbroot", "cpus_allowed_list", "control", "udev_path", "lba_map", "alua_lu_gp"}

# Values to reset a file that doesn't accept its own contents.
DEFAULTS = {"alua_tg_pt_gp": "default_tg_pt_gp"}


def attempt(act):
    try:
        return act()
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error.errno))


def read(path):
    def act():
        fd = os.open(path, os.O_RDONLY)
        try:
            return repr(os.read(fd, 65536).decode(errors="replace"))
        finally:
            os.close(fd)
    return attempt(act)


def write(path, value):
    def act():
        fd = os.open(path, os.O_WRONLY)
        try:
            count = os.write(fd, value.encode())
        finally:
            os.close(fd)
        return "ok" if count == len(value) else f"{count} bytes"
    return attempt(act)


def ask(root, words, directories):
    def say(path, done, response):
        line = f"{os.path.relpath(path, root)}\t{done}\t{response}"
        for name, word in words:
            line = line.replace(word, name)
        print(line, flush=True)

    files = []
    for directory in directories:
        for parent, subdirectories, names in os.walk(os.path.join(root, directory)):
            subdirectories.sort()
            # rtslib chooses the names of links.
            links = [name for name in subdirectories + names if os.path.islink(os.path.join(parent, name))]
            entries = sorted(set(subdirectories + names) - set(links)) + ["(link)"] * len(links)
            say(parent, "list", " ".join(entries))
            for name in sorted(names):
                path = os.path.join(parent, name)
                if not os.path.islink(path):
                    files.append(path)
    for path in files:
        name = enter(path)
        say(path, "mode", oct(stat.S_IMODE(os.stat(name).st_mode)))
        say(path, "read", read(name))
    for path in files:
        name = enter(path)
        if not os.stat(name).st_mode & stat.S_IWUSR or name in UNTRIED:
            continue
        before = read(name)
        for value in VALUES:
            shown = value if len(value) < 40 else f"{value[:4]}… {len(value)}"
            response = write(name, value)
            say(path, f"write {shown!r}", f"{response}, then {read(name)}")
        value = before[1:-1].encode().decode("unicode_escape") if before[0] in "'\"" else ""
        value = DEFAULTS.get(name, value)
        write(name, value or "NULL")


def enter(path):
    """Enters the directory of a file, because each part of a path is looked up in the file system.
    Returns the file name."""
    parent, name = os.path.split(path)
    os.chdir(parent)
    return name


def responses(file):
    found = {}
    with open(file) as lines:
        for line in lines:
            path, done, response = line.rstrip("\n").split("\t", 2)
            found[f"{path} {done}"] = response
    return found


def compare(lio, riserd, allowed):
    patterns = []
    with open(allowed) as lines:
        for line in lines:
            if line.strip() and not line.startswith("#"):
                rule, reason = line.rstrip("\n").split(" -- ", 1)
                number, rule = rule.split(" ", 1)
                pattern, response = rule.split(" => ", 1)
                patterns.append([re.compile(pattern), re.compile(response), reason, int(number), 0])
    lio, riserd = responses(lio), responses(riserd)
    unlisted = 0
    for key in sorted(set(lio) | set(riserd)):
        one, other = lio.get(key, "nothing"), riserd.get(key, "nothing")
        if one == other:
            continue
        known = next((entry for entry in patterns
                      if entry[0].search(key) and entry[1].match(other)), None)
        if known:
            known[4] += 1
        else:
            unlisted += 1
            print(f"DIFFERS {key}\n    LIO    {one}\n    riserd {other}")
    others = 0
    for pattern, _, reason, number, count in patterns:
        print(f"{count:5} {pattern.pattern}: {reason}")
        if count != number:
            others += 1
            print(f"NOT {number} BUT {count} DIFFER LIKE {pattern.pattern}")
    print(f"result: {len(lio)} responses of LIO, {len(riserd)} of riserd; "
          f"{unlisted} differ for no reason that is listed")
    return 1 if unlisted or others else 0


def main():
    if sys.argv[1] == "compare":
        sys.exit(compare(*sys.argv[2:]))
    end = sys.argv.index("--")
    words = [word.split("=", 1) for word in sys.argv[3:end]]
    ask(sys.argv[2], words, sys.argv[end + 1:])


main()
