"""Path queries of the kernel.

    sa.py route SOURCE DESTINATION [OPTION=NUMBER …]

uses the kernel's RDMA CM to request a path between two GIDs, or between two IP addresses with a slash as
prefix, and prints the result. Options: timeout (in milliseconds), count (concurrent queries), class (traffic
class), service (service ID). If there is an unsuccessful event, this is printed and the program exits.

    sa.py given [SOCKET] -- PROGRAM …

executes a program that receives kernel queries from a socket in this network namespace, and queries from
programs on a Unix socket with the given path, as passed by a service manager.

    sa.py group MGID PORT

creates a multicast group with the same parameters as the IPoIB broadcast group, and a port as its member, using
libibumad.
"""

import ctypes
import fcntl
import ipaddress
import os
import socket
import struct
import sys

CREATE_ID, RESOLVE_ROUTE, GET_EVENT, QUERY, RESOLVE_ADDR = 0, 4, 12, 19, 21
EVENTS = {0: "ADDR_RESOLVED", 1: "ADDR_ERROR", 2: "ROUTE_RESOLVED", 3: "ROUTE_ERROR"}
AF_IB, PS_TCP, RC, PATHS = 27, 0x0106, 2, 1


class Channel:
    """A file of rdma_ucm: commands are written, and responses are returned in memory given by the command."""

    def __init__(self):
        self.file = os.open("/dev/infiniband/rdma_cm", os.O_RDWR)

    def command(self, number, body, response_len=0):
        buffer = ctypes.create_string_buffer(max(response_len, 1))
        if response_len:
            body = body(ctypes.addressof(buffer))
        os.write(self.file, struct.pack("IHH", number, len(body), response_len) + body)
        return buffer.raw[:response_len]

    def create(self):
        made = self.command(
            CREATE_ID, lambda at: struct.pack("QQHB5x", 1, at, PS_TCP, RC), 4
        )
        return struct.unpack("I", made)[0]

    def event(self, wanted):
        got = self.command(GET_EVENT, lambda at: struct.pack("Q", at), 512)
        _, number, event, status = struct.unpack_from("QIIi", got)
        if EVENTS.get(event) != wanted:
            sys.exit(f"{EVENTS.get(event, event)} status {status}")
        return number


def sockaddr(text, traffic_class=0, service=0, port=5555):
    """Returns a socket address: InfiniBand for a GID, or IP for an address with a slash as prefix."""
    if text.startswith("/"):
        ip = ipaddress.ip_address(text[1:])
        if ip.version == 4:
            return struct.pack("=H2s4s", socket.AF_INET, port.to_bytes(2, "big"), ip.packed), 16
        flow = (traffic_class << 20).to_bytes(4, "big")
        return struct.pack("=H2s4s16sI", socket.AF_INET6, port.to_bytes(2, "big"), flow, ip.packed, 0), 28
    gid = ipaddress.IPv6Address(text).packed
    mask = 2**64 - 1 if service else 0
    body = struct.pack(">HI16sQQ", 0xFFFF, traffic_class << 20, gid, service, mask)
    return struct.pack("=H", AF_IB) + body + bytes(8), 48


def given(*words):
    at = words.index("--")
    # NETLINK_RDMA and the group for local services.
    kernel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 20)
    kernel.bind((0, 1 << (3 - 1)))
    given = []
    for path in words[:at]:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()
        given.append(listener)
    given.append(kernel)
    # Use high numbers that don't conflict with the final ones.
    high = [fcntl.fcntl(one, fcntl.F_DUPFD, 10) for one in given]
    for number, one in enumerate(high, 3):
        os.dup2(one, number)
        os.close(one)
    os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(given)))
    command = words[at + 1 :]
    os.execvp(command[0], command)


def route(source, destination, *words):
    options = {"timeout": 20000, "count": 1, "class": 0, "service": 0x0000000001060000 + 5555}
    options.update((k, int(v, 0)) for k, v in (word.split("=") for word in words))
    channel = Channel()
    identifiers = [channel.create() for _ in range(options["count"])]
    source, source_length = sockaddr(source, options["class"])
    destination, length = sockaddr(destination, options["class"], options["service"])
    for number in identifiers:
        head = struct.pack("IIHHI", number, 20000, source_length, length, 0)
        channel.command(RESOLVE_ADDR, head + source.ljust(128, b"\0") + destination.ljust(128, b"\0"))
    for _ in identifiers:
        channel.event("ADDR_RESOLVED")
    for number in identifiers:
        channel.command(RESOLVE_ROUTE, struct.pack("II", number, options["timeout"]))
    for _ in identifiers:
        number = channel.event("ROUTE_RESOLVED")
        got = channel.command(
            QUERY, lambda at: struct.pack("QII", at, number, PATHS), 8 + 6 * 72
        )
        count, _, flags, _ = struct.unpack_from("IIII", got)
        record = got[16:80]
        (service, dgid, sgid, dlid, slid, flow, tclass, reversible, pkey, qos, mtu, rate, life) = (
            struct.unpack_from(">Q16s16sHHIBBHHBBB", record)
        )
        print(
            f"paths {count} flags {flags:#x} service {service:#x}",
            f"dgid {ipaddress.IPv6Address(dgid)} sgid {ipaddress.IPv6Address(sgid)}",
            f"dlid {dlid} slid {slid} flow {flow >> 8 & 0xFFFFF} hops {flow & 0xFF} class {tclass}",
            f"reversible {reversible >> 7} pkey {pkey:#06x} sl {qos & 0xF} qos {qos >> 4}",
            f"mtu {mtu & 0x3F} rate {rate & 0x3F} life {life & 0x3F}",
        )


def group(mgid, port):
    mgid, port = (ipaddress.IPv6Address(gid).packed for gid in (mgid, port))
    umad = ctypes.CDLL("libibumad.so.3")
    file = umad.umad_open_port(b"riser0", 1)
    agent = umad.umad_register(file, 3, 2, 0, None)
    assert file >= 0 and agent >= 0, (file, agent)
    # Set() of a McMemberRecord with all components except for the LID and times.
    mask = 0x1F3F7
    mad = struct.pack(">BBBBHHQHHI", 1, 3, 2, 2, 0, 0, 1, 0x38, 0, 0) + bytes(12)
    mad += struct.pack(">QHHQ", 0, 0, 0, mask)
    # Q_Key, MTU 2048, P_Key, rate 2.5 Gbit/s, hop limit 64, link-local scope, full member.
    mad += mgid + port + struct.pack(">IHBBHBBIBB", 0xB1B, 0, 0x84, 0, 0xFFFF, 0x82, 0, 64, 0x21, 0)
    head = umad.umad_size()
    buffer = ctypes.create_string_buffer(bytes(head) + mad.ljust(256, b"\0"), head + 256)
    umad.umad_set_addr(buffer, 1, 1, 0, ctypes.c_uint(0x80010000))
    assert umad.umad_send(file, agent, buffer, 256, 5000, 3) == 0
    length = ctypes.c_int(256)
    assert umad.umad_recv(file, buffer, ctypes.byref(length), 30000) >= 0
    method, status = struct.unpack_from(">BH", buffer.raw, head + 3)
    assert (method, status) == (0x81, 0), (method, status)
    print("made", ipaddress.IPv6Address(buffer.raw[head + 56 : head + 72]))


{"group": group, "route": route, "given": given}[sys.argv[1]](*sys.argv[2:])
