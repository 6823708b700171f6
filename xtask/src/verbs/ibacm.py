"""ibacm on our libraries: programs, and a stand-in for the kernel, ask it for paths.

ibacm gets its sockets as a service manager gives them. The one for the kernel is of NETLINK_USERSOCK, by
which programs talk to each other: NETLINK_RDMA is there with the kernel's InfiniBand stack only, whose
software devices never ask. `question` is what the kernel would send.

usage: ibacm.py alone FOLDER ADDRESS DESTINATION
       ibacm.py pair FOLDER ADDRESS ADDRESS ADMINISTRATOR RISER-SA

`alone` has an ibacm whose library has a subnet administrator of its own. In a `pair` two of them find each
other by multicast, and their paths by riser-sa. saquery lists the group that they have joined, and a
subscription to notices.
"""

import ctypes
import ipaddress
import os
import socket
import struct
import subprocess
import sys
import time

NETLINK_USERSOCK = 2
GROUP = 1 << (3 - 1)
F_ERR = 0x0100
RESOLVE = 4 << 10
PATIENCE = 15

# A service manager's sockets begin at descriptor 3, which is no other one's.
while os.open("/dev/null", os.O_RDONLY) < 4:
    pass


def netlink():
    opened = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_USERSOCK)
    opened.bind((0, GROUP))
    return opened


class Ibacm:
    """An ibacm at an address, as long as the block lasts."""

    def __init__(self, directory, address, administrator=None):
        os.mkdir(directory)
        self.directory, self.address, self.path = directory, address, f"{directory}/socket"
        options = {
            "log_file": f"{directory}/ibacm.log",
            "log_level": 2,
            "lock_file": f"{directory}/ibacm.pid",
            "addr_prot": "acm",
            "route_prot": "sa",
            "support_ips_in_addr_cfg": 1,
            # No more than an interface of 1500 bytes carries.
            "min_mtu": 1024,
        }
        with open(f"{directory}/opts", "w") as file:
            file.writelines(f"{name} {value}\n" for name, value in options.items())
        with open(f"{directory}/addr", "w") as file:
            file.write(f"{address} riser0 1 default\n")
        listener, kernel = socket.socket(socket.AF_UNIX), netlink()
        listener.bind(self.path)
        listener.listen()
        os.dup2(listener.fileno(), 3)
        os.dup2(kernel.fileno(), 4)
        changes = {"RISER_DEVICES": f"riser0={address}", "RISER_LINK_LAYER": "infiniband"}
        if administrator:
            changes["RISER_SA"] = administrator
        script = "LISTEN_PID=$$ LISTEN_FDS=2 exec ibacm --systemd -O $0/opts -A $0/addr"
        command = ["sh", "-c", script, directory]
        self.process = subprocess.Popen(command, pass_fds=(3, 4), env={**os.environ, **changes})

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()
        with open(f"{self.directory}/ibacm.log") as log:
            print(log.read(), file=sys.stderr)

    def ask(self, kind, destination):
        """Has ib_acme ask for a path and verify it, once ibacm has joined its group."""
        until = time.monotonic() + PATIENCE
        command = ["ib_acme", "-S", self.path, "-f", kind, "-s", self.address, "-d", destination, "-v"]
        while True:
            said = subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout
            if "SA verification: success" in said:
                print(said)
                return
            assert time.monotonic() < until, said
            time.sleep(0.05)


def attribute(kind, value):
    whole = struct.pack("=HH", 4 + len(value), kind) + value
    return whole + bytes(-len(whole) % 4)


def question(sequence, source, destination):
    mandatory = 1 << 13
    body = b"riser0".ljust(64, b"\0") + bytes([1, 0, 0, 0])
    body += attribute(4 | mandatory, destination) + attribute(5 | mandatory, source)
    body += attribute(7 | mandatory, struct.pack("=H", 0xFFFF))
    return struct.pack("=IHHII", 16 + len(body), RESOLVE, 1, sequence, 0) + body


def ask_group(kernel, sequence, source, destination):
    """The path record of the response; none where it is refused."""
    try:
        kernel.sendto(question(sequence, source, destination), (0, GROUP))
    except ConnectionRefusedError:
        # It has gone to the group, and not to the kernel, which takes nothing of this protocol.
        pass
    while True:
        response = kernel.recv(4096)
        _, kind, flags, responded, _ = struct.unpack_from("=IHHII", response)
        if (kind, responded) != (RESOLVE, sequence) or flags & 1:
            continue
        if flags & F_ERR:
            return None
        length, kind, path_flags = struct.unpack_from("=HHI", response, 16)
        assert (length, kind) == (76, 1), (length, kind)
        # PRIMARY, GMP, OUTBOUND, INBOUND_REVERSE.
        assert path_flags == 0x2B, path_flags
        return response[28:92]


def gid(text):
    address = ipaddress.ip_address(text)
    return address.packed if address.version == 6 else bytes(10) + b"\xff\xff" + address.packed


def subscribe():
    """Subscribes to all notices, by libibumad; the library keeps what this returns."""
    umad = ctypes.CDLL("libibumad.so.3")
    umad.umad_init()
    port = umad.umad_open_port(b"riser0", 1)
    agent = umad.umad_register(port, 3, 2, 1, None)
    # Set(InformInfo) of the class SubnAdm, for queue pair 1, to notices of all kinds about any LID.
    mad = struct.pack(">BBBBHHQHHI", 1, 3, 2, 2, 0, 0, 7, 3, 0, 0) + bytes(32 + 16)
    mad += struct.pack(">HHHBBHHI4B", 0xFFFF, 0, 0, 1, 1, 0xFFFF, 0xFFFF, 1 << 8 | 18, 0, 255, 255, 255)
    head = umad.umad_size()
    buffer = ctypes.create_string_buffer(head + 256)
    umad.umad_set_addr(buffer, 1, 1, 0, ctypes.c_int(0x80010000))
    buffer[head : head + len(mad)] = mad
    sent = umad.umad_send(port, agent, buffer, 256, 1000, 3)
    assert sent == 0, sent
    length = ctypes.c_int(256)
    received = umad.umad_recv(port, buffer, ctypes.byref(length), PATIENCE * 1000)
    status = buffer[head + 4 : head + 6]
    assert received == agent and status == bytes(2), (received, status)
    return umad


def saquery(option, *expected):
    said = subprocess.run(["saquery", option], stdout=subprocess.PIPE, text=True).stdout
    print(said)
    for words in expected:
        assert words in said, words


def alone(directory, address, destination):
    kernel = netlink()
    kernel.settimeout(PATIENCE)
    with Ibacm(f"{directory}/ibacm", address) as ibacm:
        ibacm.ask("g", destination)
        found = ask_group(kernel, 1, gid(address), gid(destination))
        assert found and found[8:40] == gid(destination) + gid(address), found
        print("the kernel has its path")
        assert ask_group(kernel, 2, gid("fd00::1234"), gid(destination)) is None
        print("a source of another host is refused")


def pair(directory, first, second, administrator, program):
    daemon = subprocess.Popen([program, "--no-netlink", "--addr", administrator])
    try:
        with Ibacm(f"{directory}/first", first, administrator) as one:
            with Ibacm(f"{directory}/second", second, administrator) as other:
                one.ask("i", second)
                other.ask("i", first)
                print("both have found each other")
                changes = {"RISER_SA": administrator, "RISER_LINK_LAYER": "infiniband"}
                os.environ.update(changes, RISER_DEVICES=f"riser0={second}")
                library = subscribe()
                saquery("-g", "MCMemberRecord group dump")
                saquery("-I", "InformInfoRecord dump", f"SubscriberGID...........{second}")
                saquery("-D", first, second)
                print("what they have set is listed")
                del library
    finally:
        daemon.terminate()
        daemon.wait()


{"alone": alone, "pair": pair}[sys.argv[1]](*sys.argv[2:])
