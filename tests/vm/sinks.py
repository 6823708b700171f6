"""Checks the sinks of RDMA READs in a capture of iWARP: sinks.py CAPTURE ADDRESS

Each READ request sent by this address must name its own sink. siw chooses numbers at random, so a few
may be used again. Prints the number of READs.
"""

import socket
import struct
import sys

# Control bytes of DDP and RDMAP: version 1, last segment or not, tagged or not (RFC 5040, RFC 5041).
READ_REQUEST = bytes([0x41, 0x41])
# Length of a READ request, and its queue number (RFC 5040 4.4).
LENGTH, QUEUE = 46, bytes([0, 0, 0, 1])


def segments(path, source):
    """Returns the payloads of TCP segments, without retransmissions, by connection."""
    with open(path, "rb") as file:
        data = file.read()
    order = {b"\xd4\xc3\xb2\xa1": "<", b"\xa1\xb2\xc3\xd4": ">"}[data[:4]]
    at, found = 24, {}
    while at + 16 <= len(data):
        length = struct.unpack_from(order + "8xI", data, at)[0]
        packet = data[at + 16 : at + 16 + length]
        at += 16 + length
        if packet[12:14] != b"\x08\x00" or packet[23] != 6 or packet[26:30] != source:
            continue
        tcp = 14 + (packet[14] & 15) * 4
        ports, sequence = packet[tcp : tcp + 4], packet[tcp + 4 : tcp + 8]
        payload = packet[tcp + (packet[tcp + 12] >> 4) * 4 : 14 + struct.unpack(">H", packet[16:18])[0]]
        if payload:
            found.setdefault(ports, {})[sequence] = payload
    return found


def requests(payload):
    """Returns the sinks of READ requests that begin in a segment."""
    at = 0
    while at + 2 <= len(payload):
        length = struct.unpack_from(">H", payload, at)[0]
        frame = payload[at + 2 : at + 2 + length]
        if frame[:2] == READ_REQUEST and frame[6:10] == QUEUE and length == LENGTH:
            yield frame[18:22]
        # The length includes neither itself, nor padding and CRC.
        at += (2 + length + 3) // 4 * 4 + 4


def main():
    path, address = sys.argv[1:]
    sinks = []
    for connection in segments(path, socket.inet_aton(address)).values():
        for payload in connection.values():
            sinks += requests(payload)
    if len(set(sinks)) < len(sinks) * 0.95:
        sys.exit(f"{len(sinks)} READs have only {len(set(sinks))} sinks")
    print(len(sinks))


main()
