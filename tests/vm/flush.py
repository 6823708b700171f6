"""Flushes around lost sessions: flush.py FILE CACHE TPG [PORTAL]

FILE is a unit attached by riser, CACHE is 1 if it has a volatile write cache, and TPG is the directory of its
portal group. If the target only rejects logins, its cache is kept and no flush fails. A portal that is not
listening is treated as a restart: if there were unflushed writes in a volatile cache, one flush fails.
"""

import os
import subprocess
import sys
import time

SIZE = 65536
path, cache, group, *portal = sys.argv[1:]


def refuse_logins():
    for value in "01":
        with open(f"{group}/enable", "w") as file:
            file.write(value)
        time.sleep(1.5)


def close_portal():
    script = f"""
        iser=$(cat {portal[0]}/iser)
        echo 0 >{group}/enable
        rmdir {portal[0]}
        sleep 3
        mkdir {portal[0]}
        [ $iser = 0 ] || echo 1 >{portal[0]}/iser
        echo 1 >{group}/enable
    """
    subprocess.run(["bash", "-ec", script], check=True)


def flush(disk):
    try:
        os.fsync(disk)
        return True
    except OSError as error:
        print("flush:", error)
        return False


disk = os.open(path, os.O_RDWR)
first, second = os.urandom(SIZE), os.urandom(SIZE)
os.pwrite(disk, first, 0)
assert flush(disk), "the flush of a connected unit failed"
refuse_logins()
assert os.pread(disk, SIZE, 0) == first, "flushed data are lost"
os.pwrite(disk, second, 0)
refuse_logins()
assert flush(disk), "the flush after refused logins failed"
if portal:
    close_portal()
    assert os.pread(disk, SIZE, 0) == second, "flushed data are lost"
    assert flush(disk), "a flush without writes since the last one failed"
    os.pwrite(disk, first, 0)
    close_portal()
    flushed = flush(disk)
    assert flushed == (cache == "0"), f"cache {cache}: the flush after a restart returned {flushed}"
    os.pwrite(disk, second, 0)
    assert flush(disk), "the flush after a reported loss failed"
os.close(disk)
with open("/tmp/written", "wb") as file:
    file.write(second)
