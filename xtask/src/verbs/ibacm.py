"""ibacm on our libraries: programs and a stand-in for the kernel ask it for a path.

ibacm gets its sockets as a service manager gives them. The one for the kernel is of NETLINK_USERSOCK, by
which programs talk to each other: NETLINK_RDMA is there with the kernel's InfiniBand stack only, whose
software devices never ask. What the kernel would send is in `question`.

usage: ibacm.py FOLDER ADDRESS DESTINATION [ADMINISTRATOR]
"""

import ipaddress
import os
import signal
import socket
import struct
import subprocess
import sys
import time

folder, address, destination = sys.argv[1:4]
NETLINK_USERSOCK = 2
GROUP = 1 << (3 - 1)
F_ERR = 0x0100
RESOLVE = 4 << 10

os.environ["RISER_DEVICES"] = f"riser0={address}"
os.environ["RISER_LINK_LAYER"] = "infiniband"
if len(sys.argv) > 4:
    os.environ["RISER_SA"] = sys.argv[4]


def netlink():
    opened = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_USERSOCK)
    opened.bind((0, GROUP))
    return opened


def attribute(kind, value):
    whole = struct.pack("=HH", 4 + len(value), kind) + value
    return whole + bytes(-len(whole) % 4)


def question(sequence, source, destination):
    mandatory = 1 << 13
    body = b"riser0".ljust(64, b"\0") + bytes([1, 0, 0, 0])
    body += attribute(4 | mandatory, destination) + attribute(5 | mandatory, source)
    body += attribute(7 | mandatory, struct.pack("=H", 0xFFFF))
    return struct.pack("=IHHII", 16 + len(body), RESOLVE, 1, sequence, 0) + body


def ask(kernel, sequence, source, destination):
    """The path record of the answer; none where it is refused."""
    try:
        kernel.sendto(question(sequence, source, destination), (0, GROUP))
    except ConnectionRefusedError:
        # It has gone to the group, and not to the kernel, which takes nothing of this protocol.
        pass
    while True:
        answer = kernel.recv(4096)
        _, kind, flags, answered, _ = struct.unpack_from("=IHHII", answer)
        if (kind, answered) != (RESOLVE, sequence) or flags & 1:
            continue
        if flags & F_ERR:
            return None
        length, kind, path_flags = struct.unpack_from("=HHI", answer, 16)
        assert (length, kind) == (76, 1), (length, kind)
        # PRIMARY, GMP, OUTBOUND, INBOUND_REVERSE.
        assert path_flags == 0x2B, path_flags
        return answer[28:92]


def gid(text):
    text = ipaddress.ip_address(text)
    return text.packed if text.version == 6 else b"\0" * 10 + b"\xff\xff" + text.packed


with open(f"{folder}/opts", "w") as opts:
    opts.write(
        f"log_file {folder}/ibacm.log\nlog_level 2\nlock_file {folder}/ibacm.pid\n"
        "route_prot sa\naddr_prot acm\nloopback_prot local\nsupport_ips_in_addr_cfg 1\n"
        "min_mtu 1024\n"
    )
with open(f"{folder}/addr", "w") as addr:
    addr.write(f"{address} riser0 1 default\n")

path = f"{folder}/socket"
listener = socket.socket(socket.AF_UNIX)
listener.bind(path)
listener.listen()
kernel = netlink()
kernel.settimeout(10)

# A service manager's sockets begin at descriptor 3. The shell's process becomes ibacm's.
script = "LISTEN_PID=$$ LISTEN_FDS=2 exec ibacm --systemd -O $0/opts -A $0/addr"
of_ibacm = netlink()
given = [os.dup2(listener.fileno(), 100), os.dup2(of_ibacm.fileno(), 101)]


def place():
    os.dup2(given[0], 3)
    os.dup2(given[1], 4)


ibacm = subprocess.Popen(["sh", "-c", script, folder], pass_fds=(3, 4), preexec_fn=place)
try:
    found, until = None, time.monotonic() + 15
    while found is None and time.monotonic() < until:
        # It refuses until it has joined its group.
        found = ask(kernel, 1, gid(address), gid(destination))
        time.sleep(0.05)
    assert found, "no path"
    assert found[8:24] == gid(destination) and found[24:40] == gid(address), found.hex()
    print("the kernel has its path")
    assert ask(kernel, 2, gid("fd00::1234"), gid(destination)) is None
    print("a source of another host is refused")
    acme = ["ib_acme", "-S", path, "-f", "g", "-s", address, "-d", destination, "-v"]
    said = subprocess.run(acme, stdout=subprocess.PIPE, text=True).stdout
    print(said)
    assert "SA verification: success" in said
finally:
    ibacm.send_signal(signal.SIGTERM)
    ibacm.wait()
    with open(f"{folder}/ibacm.log") as log:
        print(log.read(), file=sys.stderr)
