"""Compares the protection information (T10 DIF) of two disks.

    pi.py compare JUDGE FIRST SECOND DIFFERENCES [NAME=VALUE …]

runs the same commands on two generic SCSI devices with the same size, block length and protection type, and
compares the status, the sense data and the transferred data. FIRST is the kernel's scsi_debug or LIO (JUDGE).
DIFFERENCES is a file with the expected differences, each of which must exist; see the comment there. Exits
with status 1 after any other difference. Options: cdb is the maximum length of a CDB of the host of SECOND.
other_type compares disks with different protection types.

    pi.py write DEVICE LBA COUNT SEED [WRPROTECT [WRONG]]
    pi.py tuples DEVICE LBA COUNT
    pi.py generated DEVICE LBA COUNT

write writes blocks with known contents, by default without protection information. The bits of WRONG are inverted in
the guard. tuples prints the stored protection information, a line for each block. generated checks that it is valid for
blocks that were written without it.

All devices use a single buffer, where each block is followed by its protection information. The module sg_pi
converts it for the kernel's own disks.
"""

import ctypes
import fcntl
import functools
import mmap
import os
import re
import sys
import zlib

SG_IO, TO_DEVICE, FROM_DEVICE, NO_DATA = 0x2285, -2, -3, -1
ONES = b"\xff" * 8

# Operation codes by the length of the CDB, and service actions of 32-byte CDBs.
READ = {6: 0x08, 10: 0x28, 12: 0xA8, 16: 0x88, 32: 0x09}
WRITE = {6: 0x0A, 10: 0x2A, 12: 0xAA, 16: 0x8A, 32: 0x0B}
VERIFY = {10: 0x2F, 12: 0xAF, 16: 0x8F, 32: 0x0A}
WRITE_AND_VERIFY = {10: 0x2E, 12: 0xAE, 16: 0x8E, 32: 0x0C}
WRITE_SAME = {10: 0x41, 16: 0x93, 32: 0x0D}
COMPARE_AND_WRITE = {16: 0x89}
NAMES = [
    (READ, "READ"),
    (WRITE, "WRITE"),
    (VERIFY, "VERIFY"),
    (WRITE_AND_VERIFY, "WRITE AND VERIFY"),
    (WRITE_SAME, "WRITE SAME"),
    (COMPARE_AND_WRITE, "COMPARE AND WRITE"),
]
UNMAP_BIT, NDOB, BYTCHK_1, BYTCHK_3 = 8, 1, 2, 6


class Header(ctypes.Structure):
    """struct sg_io_hdr."""

    _fields_ = [
        ("interface_id", ctypes.c_int),
        ("dxfer_direction", ctypes.c_int),
        ("cmd_len", ctypes.c_ubyte),
        ("mx_sb_len", ctypes.c_ubyte),
        ("iovec_count", ctypes.c_ushort),
        ("dxfer_len", ctypes.c_uint),
        ("dxferp", ctypes.c_void_p),
        ("cmdp", ctypes.c_void_p),
        ("sbp", ctypes.c_void_p),
        ("timeout", ctypes.c_uint),
        ("flags", ctypes.c_uint),
        ("pack_id", ctypes.c_int),
        ("usr_ptr", ctypes.c_void_p),
        ("status", ctypes.c_ubyte),
        ("masked_status", ctypes.c_ubyte),
        ("msg_status", ctypes.c_ubyte),
        ("sb_len_wr", ctypes.c_ubyte),
        ("host_status", ctypes.c_ushort),
        ("driver_status", ctypes.c_ushort),
        ("resid", ctypes.c_int),
        ("duration", ctypes.c_uint),
        ("info", ctypes.c_uint),
    ]


class Outcome:
    """Result of a command."""

    def __init__(self, header, sense, data):
        self.data = data
        self.information = "none"
        self.status = {0: "good", 2: "check", 4: "met"}.get(header.status, f"{header.status:#x}")
        if header.host_status:
            self.status = f"host {header.host_status:#x}"
        elif header.status == 2:
            self.status = self.parse(sense)

    def parse(self, sense):
        if sense[0] & 0x7F in (0x70, 0x71):
            if sense[0] & 0x80:
                self.information = str(int.from_bytes(sense[3:7], "big"))
            return f"{sense[2] & 15:x}/{sense[12]:02x}/{sense[13]:02x}"
        at, end = 8, 8 + sense[7]
        while at + 2 <= end:
            if sense[at] == 0 and sense[at + 2] & 0x80:
                self.information = str(int.from_bytes(sense[at + 4 : at + 12], "big"))
            at += 2 + sense[at + 1]
        return f"{sense[1] & 15:x}/{sense[2]:02x}/{sense[3]:02x}"


class Device:
    """A generic SCSI device."""

    def __init__(self, path):
        self.file = os.open(path, os.O_RDWR)
        self.memory = mmap.mmap(-1, 4 << 20)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        # TEST UNIT READY reports the unit attention conditions of a new session.
        while self.send(bytes(6)).status.startswith("6/"):
            pass
        capacity = self.send(sixteen(0x9E, 0x10, 0, 32), length=32).data
        self.last = int.from_bytes(capacity[:8], "big")
        self.block = int.from_bytes(capacity[8:12], "big")
        self.type = (capacity[12] >> 1 & 7) + 1 if capacity[12] & 1 else 0

    def send(self, cdb, out=None, length=0):
        header, sense = Header(), ctypes.create_string_buffer(96)
        command = ctypes.create_string_buffer(bytes(cdb), len(cdb))
        if out is not None:
            self.memory[: len(out)] = out
            length = len(out)
        header.interface_id = ord("S")
        header.dxfer_direction = TO_DEVICE if out else FROM_DEVICE if length else NO_DATA
        header.cmd_len, header.mx_sb_len, header.dxfer_len = len(cdb), 96, length
        header.dxferp = self.address if length else None
        header.cmdp, header.sbp = ctypes.addressof(command), ctypes.addressof(sense)
        header.timeout = 60000
        fcntl.ioctl(self.file, SG_IO, header)
        data = b"" if out else self.memory[: length - header.resid]
        return Outcome(header, sense.raw, data)


def crc_table():
    for byte in range(256):
        crc = byte << 8
        for _ in range(8):
            crc = (crc << 1 ^ (0x8BB7 if crc & 0x8000 else 0)) & 0xFFFF
        yield crc


CRC = list(crc_table())


@functools.cache
def guard(block):
    """Returns the CRC of a block. Guests are slow, and a run uses the same few blocks again and again."""
    crc = 0
    for byte in block:
        crc = crc << 8 & 0xFFFF ^ CRC[crc >> 8 ^ byte]
    return crc


def tuple_of(block, application=0x1234, reference=0, wrong=0):
    parts = (guard(block) ^ wrong, 2), (application, 2), (reference & 0xFFFFFFFF, 4)
    return b"".join(value.to_bytes(size, "big") for value, size in parts)


@functools.cache
def make_block(size, first):
    return bytes((first + at * 13 + at // 64) & 0xFF for at in range(size))


def make_blocks(size, count, seed):
    """Returns blocks with different contents that depend on the seed."""
    return [make_block(size, (seed * 31 + i * 7) & 0xFF) for i in range(count)]


def join(blocks, tuples):
    return b"".join(block + own for block, own in zip(blocks, tuples))


def sixteen(code, flags, lba, count):
    return bytes([code, flags]) + lba.to_bytes(8, "big") + count.to_bytes(4, "big") + bytes(2)


def cdb_of(command, size, lba, count, protect=0, flags=0, tags=None):
    """Returns a CDB with `size` bytes. tags are the expected reference tag, application tag and mask."""
    code, flags = command[size], protect << 5 | flags
    if size == 6:
        return bytes([code]) + lba.to_bytes(3, "big") + bytes([count, 0])
    if size == 10:
        return bytes([code, flags]) + lba.to_bytes(4, "big") + bytes(1) + count.to_bytes(2, "big") + bytes(1)
    if size == 12:
        return bytes([code, flags]) + lba.to_bytes(4, "big") + count.to_bytes(4, "big") + bytes(2)
    if size == 16:
        return sixteen(code, flags, lba, count)
    reference, application, mask = tags or (lba & 0xFFFFFFFF, 0, 0)
    long = bytes([0x7F, 0, 0, 0, 0, 0, 0, 0x18, 0, code, flags, 0]) + lba.to_bytes(8, "big")
    long += reference.to_bytes(4, "big") + application.to_bytes(2, "big") + mask.to_bytes(2, "big")
    return long + count.to_bytes(4, "big")


def name_of(command, size, protect, flags):
    name = next(name for known, name in NAMES if known is command)
    name += f"({size})"
    field = "RDPROTECT" if command is READ else "VRPROTECT" if command is VERIFY else "WRPROTECT"
    if size > 6:
        name += f" {field}={protect}"
    if command is VERIFY:
        name += f" BYTCHK={flags >> 1 & 3}"
    if command is WRITE_SAME:
        name += " UNMAP" if flags & UNMAP_BIT else ""
        name += " NDOB" if flags & NDOB else ""
    return name


class Rule:
    """An expected difference."""

    def __init__(self, line):
        parts = [part.strip() for part in line.split(" | ")]
        if len(parts) != 6:
            sys.exit(f"invalid rule: {line}")
        self.line, self.judge, self.types = line, parts[0], parts[1]
        self.step, self.field = re.compile(parts[2]), parts[3]
        self.values = re.compile(parts[4]), re.compile(parts[5])
        self.is_tried = self.is_used = False

    def is_for(self, name):
        return self.step.fullmatch(name) is not None

    def explains(self, name, field, values):
        matches = self.is_for(name) and field == self.field
        return matches and all(r.fullmatch(v) for r, v in zip(self.values, values))


class Comparison:
    """Two devices, the differences found so far, and those expected."""

    def __init__(self, judge, first, second, rules, cdb):
        self.devices = first, second
        self.judge, self.type, self.size = judge, first.type, first.block
        self.last, self.longest = first.last, cdb
        self.sizes = [size for size in (6, 10, 12, 16, 32) if size <= cdb]
        self.rules = [r for r in rules if r.judge == judge and str(self.type) in r.types]
        self.steps = self.unexpected = self.expected = 0
        self.used = 8

    def region(self, count=4):
        """Returns the first LBA of blocks that are not used by any other step."""
        self.used += count + 1
        return self.used - count

    def compare(self, name, cdb, out=None, length=0, has_tuples=False, mask=None):
        """Runs a command on both devices. Only compares the bits in mask if it is set."""
        results = [device.send(cdb, out, length) for device in self.devices]
        self.steps += 1
        for rule in self.rules:
            rule.is_tried |= rule.is_for(name)
        fields = {"status": [r.status for r in results], "information": [r.information for r in results]}
        if all(r.status == "good" for r in results) and length:
            data = [r.data for r in results]
            if mask:
                data = [bytes(a & b for a, b in zip(d, mask)).hex(" ", 4) for d in data]
                fields["data"] = data
            elif has_tuples:
                unit = self.size + 8
                fields["data"] = [hash_of(b"".join(d[at : at + self.size] for at in range(0, len(d), unit))) for d in data]
                fields["tuples"] = [" ".join(show(d[at - 8 : at]) for at in range(unit, len(d) + 1, unit)) for d in data]
            else:
                fields["data"] = [hash_of(d) for d in data]
        if results[0].status != results[1].status:
            fields.pop("information")
        for field, values in fields.items():
            if values[0] != values[1]:
                self.report(name, field, values)
        return results

    def report(self, name, field, values):
        rules = [rule for rule in self.rules if rule.explains(name, field, values)]
        for rule in rules:
            rule.is_used = True
        if rules:
            self.expected += 1
            return
        self.unexpected += 1
        print(f"{self.judge}, type {self.type}, {self.size} bytes | {name} | {field} | {values[0]} | {values[1]}")

    def run(self, command, size, lba, blocks, tuples=None, protect=0, flags=0, tags=None, note="", count=None):
        """Runs a command with data from the host. Returns whether both devices agree."""
        out = join(blocks, tuples) if protect else b"".join(blocks)
        cdb = cdb_of(command, size, lba, len(blocks) if count is None else count, protect, flags, tags)
        results = self.compare(name_of(command, size, protect, flags) + note, cdb, out=out or None)
        return results[0].status == results[1].status

    def read(self, size, lba, count, protect=0, tags=None, note=""):
        unit = self.size + (8 if protect else 0)
        cdb = cdb_of(READ, size, lba, count, protect, 0, tags)
        name = name_of(READ, size, protect, 0) + note
        return self.compare(name, cdb, length=count * unit, has_tuples=protect > 0)

    def prepare(self, lba, blocks, tuples):
        """Writes blocks with any protection information, which is not checked. With type 2, scsi_debug checks it: in a
        32-byte CDB, it uses byte 1 instead of byte 10."""
        size = 32 if self.type == 2 else 16
        cdb = cdb_of(WRITE, size, lba, len(blocks), 3)
        for device in self.devices:
            status = device.send(cdb, join(blocks, tuples)).status
            if status != "good":
                sys.exit(f"cannot write LBA {lba} with WRPROTECT=3: {status}")

    def stored(self, lba, count, note):
        """Compares the stored blocks and protection information."""
        if self.type == 2 and self.longest < 32:
            self.read(16, lba, count, note=note)
        else:
            self.read(32 if self.type == 2 else 16, lba, count, 3, note=note)

    def blocks(self, count=4):
        return make_blocks(self.size, count, self.used)

    def valid(self, lba, blocks, application=0x1234, reference=None):
        first = lba if reference is None else reference
        return [tuple_of(block, application, first + i) for i, block in enumerate(blocks)]

    def sizes_of(self, command):
        """Returns the lengths of CDBs that the judge supports. 32-byte CDBs are only supported with type 2."""
        most = 32 if self.type == 2 else 16
        sizes = [size for size in self.sizes if size in command and size <= most]
        if self.judge == "scsi_debug" and command in (VERIFY, WRITE_SAME):
            sizes = [size for size in sizes if size in (10, 16)]
        elif self.judge == "LIO" and command is WRITE_AND_VERIFY:
            sizes = [size for size in sizes if size in (10, 16)]
        return sizes

    def finish(self):
        stale = [rule for rule in self.rules if rule.is_tried and not rule.is_used]
        for rule in stale:
            print(f"{self.judge}, type {self.type}, {self.size} bytes: no difference matches: {rule.line}")
        print(f"{self.steps} commands, {self.expected} expected and {self.unexpected} other differences")
        return self.unexpected == 0 and not stale and self.steps > 100


def hash_of(data):
    """Returns a short text for data."""
    return f"{len(data)} bytes of {zlib.crc32(data):08x}" if any(data) else f"{len(data)} zeros"


def show(own):
    return f"{own[:2].hex()}.{own[2:4].hex()}.{own[4:].hex()}"


def wrong_tuples(block, reference):
    """Yields invalid and special tuples of a block, with a name."""
    yield "wrong guard", tuple_of(block, reference=reference, wrong=1)
    yield "wrong reference tag", tuple_of(block, reference=reference + 1)
    yield "other application tag", tuple_of(block, 0xABCD, reference)
    yield "application tag FFFFh", tuple_of(block, 0xFFFF, reference)
    yield "application tag FFFFh, wrong guard", tuple_of(block, 0xFFFF, reference, 1)
    yield "application tag FFFFh, wrong reference tag", tuple_of(block, 0xFFFF, reference + 1)
    yield "all ones", ONES
    yield "wrong guard and reference tag", tuple_of(block, reference=reference + 1, wrong=1)


def long_commands(c):
    """32-byte CDBs with another protection type."""
    if c.type == 2 or c.longest < 32:
        return
    blocks = c.blocks()
    for protect in (0, 1):
        c.read(32, 16, 4, protect)
        c.run(WRITE, 32, 16, blocks, c.valid(16, blocks), protect)


def describe(c):
    """Fields of the commands that report protection."""
    c.compare("INQUIRY", bytes([0x12, 0, 0, 0, 36, 0]), length=36, mask=bytes(5) + b"\x01")
    page = bytes([0x12, 1, 0x86, 0, 64, 0])
    c.compare("INQUIRY page 86h GRD_CHK", page, length=64, mask=bytes(4) + b"\x04")
    c.compare("INQUIRY page 86h APP_CHK", page, length=64, mask=bytes(4) + b"\x02")
    c.compare("INQUIRY page 86h REF_CHK", page, length=64, mask=bytes(4) + b"\x01")
    mask = b"\xff" * 12 + b"\x0f\xf0"
    c.compare("READ CAPACITY(16)", sixteen(0x9E, 0x10, 0, 32), length=32, mask=mask)
    c.compare("READ CAPACITY(10)", bytes([0x25] + [0] * 9), length=8, mask=b"\xff" * 8)
    control = bytes([0x1A, 8, 0x0A, 0, 255, 0])
    c.compare("MODE SENSE(6) ATO", control, length=255, mask=bytes(9) + b"\x80")


def reads(c):
    """READ of valid blocks, with all CDBs and all values of RDPROTECT."""
    for size in c.sizes_of(READ):
        lba, blocks = c.region(), c.blocks()
        if c.type == 2 and c.longest < 32:
            c.run(WRITE, 16, lba, blocks)
        else:
            c.prepare(lba, blocks, c.valid(lba, blocks))
        for protect in range(8) if size > 6 else [0]:
            c.read(size, lba, 4, protect)
            c.read(size, lba + 1, 2, protect, note=", some of the blocks")


def stored_tuples(c):
    """READ and VERIFY of blocks with invalid protection information on the medium."""
    if c.type == 2:
        return
    for number in range(8):
        lba, blocks = c.region(), c.blocks()
        tuples = c.valid(lba, blocks)
        name, tuples[2] = list(wrong_tuples(blocks[2], lba + 2))[number]
        c.prepare(lba, blocks, tuples)
        note = f", {name} on the medium"
        for protect in range(6):
            c.read(16, lba, 4, protect, note=note)
            c.read(16, lba + 2, 1, protect, note=note + ", one block")
            if c.judge == "scsi_debug":
                c.compare(name_of(VERIFY, 16, protect, 0) + note, cdb_of(VERIFY, 16, lba, 4, protect))


def writes(c):
    """WRITE of valid blocks, with all CDBs and all values of WRPROTECT."""
    for command in (WRITE,) if c.judge == "scsi_debug" else (WRITE, WRITE_AND_VERIFY):
        for size in c.sizes_of(command):
            for protect in range(8) if size > 6 else [0]:
                lba, blocks = c.region(), c.blocks()
                note = f", after {name_of(command, size, protect, 0)}"
                if c.run(command, size, lba, blocks, c.valid(lba, blocks), protect):
                    c.stored(lba, 4, note)
                    c.read(16, lba, 4, note=note)


def received_tuples(c):
    """WRITE of blocks with invalid protection information."""
    size = 32 if c.type == 2 else 16
    if size > c.longest:
        return
    for number in range(8):
        for protect in range(1, 6):
            lba, blocks = c.region(), c.blocks()
            c.prepare(lba, blocks, c.valid(lba, blocks))
            blocks = c.blocks()
            tuples = c.valid(lba, blocks)
            name, tuples[2] = list(wrong_tuples(blocks[2], lba + 2))[number]
            if c.run(WRITE, size, lba, blocks, tuples, protect, note=f", {name} received"):
                c.stored(lba, 4, f", after WRITE({size}) WRPROTECT={protect}, {name} received")


def expected_tags(c):
    """Expected reference and application tags of 32-byte CDBs."""
    if c.type != 2 or c.longest < 32:
        return
    for protect in range(1, 6):
        lba, blocks = c.region(), c.blocks()
        other = c.valid(lba, blocks, reference=0x01020304)
        c.run(WRITE, 32, lba, blocks, other, protect, tags=(0x01020304, 0, 0), note=", other reference tags")
        c.stored(lba, 4, f", after WRITE(32) WRPROTECT={protect}, other reference tags")
        for first, note in ((0x01020304, "other"), (0x01020305, "wrong expected")):
            c.read(32, lba, 4, protect, tags=(first, 0, 0), note=f", {note} reference tags")
        c.read(32, lba + 2, 1, protect, tags=(0x01020306, 0, 0), note=", other reference tags, one block")
        for application, mask, note in ((0x1234, 0xFFFF, "expected"), (0x1200, 0xFF00, "masked"), (0x1235, 0xFFFF, "wrong expected")):
            tags = (0x01020304, application, mask)
            c.read(32, lba, 4, protect, tags=tags, note=f", {note} application tag")
            c.run(WRITE, 32, lba, blocks, other, protect, tags=tags, note=f", {note} application tag")
    for first in (0xFFFFFFFE, 0xFFFFFFFF):
        lba, blocks = c.region(), c.blocks()
        tags = c.valid(lba, blocks, reference=first)
        c.run(WRITE, 32, lba, blocks, tags, 1, tags=(first, 0, 0), note=", reference tags that wrap around")
        c.read(32, lba, 4, 1, tags=(first, 0, 0), note=", reference tags that wrap around")


def boundaries(c):
    """The last blocks, and blocks beyond the end."""
    end = c.last + 1
    blocks = c.blocks()
    for size in c.sizes_of(READ):
        for protect in (0, 1) if size > 6 else (0,):
            if size == 6 and end >= 1 << 21:
                continue
            for lba, count, note in (
                (end - 4, 4, "last blocks"),
                (end - 1, 1, "last block"),
                (end - 1, 2, "end exceeded"),
                (end, 1, "first block beyond the end"),
                (min((1 << {6: 21, 10: 32, 12: 32}.get(size, 64)) - 1, (1 << 64) - 1), 1, "largest LBA"),
            ):
                own = blocks[:count]
                tags = c.valid(lba, own)
                c.run(WRITE, size, lba, own, tags, protect, note=f", {note}")
                c.read(size, lba, count, protect, note=f", {note}")
        # LIO crashes.
        if size > 6 and c.judge != "LIO":
            for protect in (0, 1):
                c.run(WRITE, size, 16, [], [], protect, note=", no blocks")
                c.compare(f"READ({size}) RDPROTECT={protect}, no blocks", cdb_of(READ, size, 16, 0, protect))
                c.compare(f"READ({size}) RDPROTECT={protect}, no blocks beyond the end", cdb_of(READ, size, end + 1, 0, protect))


def verifies(c):
    """VERIFY with all values of VRPROTECT and BYTCHK."""
    can_prepare = c.type != 2 or c.longest >= 32
    for size in c.sizes_of(VERIFY):
        for protect in range(8):
            lba, blocks = c.region(), c.blocks()
            tuples = c.valid(lba, blocks)
            if can_prepare:
                c.prepare(lba, blocks, tuples)
            else:
                c.run(WRITE, 16, lba, blocks)
            name = name_of(VERIFY, size, protect, 0)
            c.compare(name, cdb_of(VERIFY, size, lba, 4, protect))
            c.compare(name + ", end exceeded", cdb_of(VERIFY, size, c.last, 2, protect))
            c.compare(name + ", no blocks", cdb_of(VERIFY, size, lba, 0, protect))
            c.run(VERIFY, size, lba, blocks, tuples, protect, BYTCHK_1)
            other = c.blocks()[1:] + c.blocks()[:1]
            c.run(VERIFY, size, lba, other, c.valid(lba, other), protect, BYTCHK_1, note=", other blocks")
            same = [blocks[0]] * 4
            if can_prepare:
                c.prepare(lba, same, c.valid(lba, same))
            else:
                c.run(WRITE, 16, lba, same)
            c.run(VERIFY, size, lba, same[:1], tuples[:1], protect, BYTCHK_3, note=", same blocks", count=4)
            c.run(VERIFY, size, lba, other[:1], c.valid(lba, other[:1]), protect, BYTCHK_3, note=", other blocks", count=4)


def same_blocks(c):
    """WRITE SAME with all values of WRPROTECT."""
    for size in c.sizes_of(WRITE_SAME):
        for protect in range(8):
            lba, blocks = c.region(), c.blocks(1)
            note = f", after {name_of(WRITE_SAME, size, protect, 0)}"
            if c.run(WRITE_SAME, size, lba, blocks, c.valid(lba, blocks), protect, count=4):
                c.read(16, lba, 4, note=note)
                c.stored(lba, 4, note)


def deallocated(c):
    """Blocks that were never written, and blocks that were unmapped in different ways."""
    size = 32 if c.type == 2 else 16
    protects = (0,) if size > c.longest else (0, 1, 2, 3, 4, 5)
    for protect in protects:
        c.read(size if protect else 16, c.last - 64, 8, protect, note=", never written")
    for code, flags in ((None, 0), (10, UNMAP_BIT), (16, UNMAP_BIT), (16, UNMAP_BIT | NDOB)):
        lba, blocks = c.region(8), c.blocks(8)
        if c.longest >= size:
            c.prepare(lba, blocks, c.valid(lba, blocks))
        else:
            c.run(WRITE, 16, lba, blocks)
        if code:
            note = name_of(WRITE_SAME, code, 0, flags)
            if not c.run(WRITE_SAME, code, lba, [] if flags & NDOB else [bytes(c.size)], flags=flags, count=8):
                continue
        else:
            note = "UNMAP"
            ranges = (22).to_bytes(2, "big") + (16).to_bytes(2, "big") + bytes(4)
            ranges += lba.to_bytes(8, "big") + (8).to_bytes(4, "big") + bytes(4)
            c.compare(note, bytes([0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0]), out=ranges)
        for protect in protects:
            c.read(size if protect else 16, lba, 8, protect, note=f", after {note}")
        block = c.blocks(1)
        c.run(WRITE, 16, lba + 3, block, note=f", after {note}")
        c.read(16, lba, 8, note=f", partly after {note}")


def compared(c):
    """COMPARE AND WRITE."""
    for protect in range(8):
        lba, (old, new) = c.region(2), c.blocks(2)
        if c.type == 2:
            c.run(WRITE, 16, lba, [old])
        else:
            c.prepare(lba, [old], c.valid(lba, [old]))
        own = [c.valid(lba, [block])[0] for block in (old, new)]
        name = name_of(COMPARE_AND_WRITE, 16, protect, 0)
        for blocks, tuples, note in (([new, new], [own[1]] * 2, ", other block"), ([old, new], own, "")):
            if c.run(COMPARE_AND_WRITE, 16, lba, blocks, tuples, protect, note=note, count=1):
                c.read(16, lba, 1, note=f", after {name}{note}")
                c.stored(lba, 1, f", after {name}{note}")
    c.run(COMPARE_AND_WRITE, 16, c.last + 1, [old, new], note=", beyond the end", count=1)
    c.run(COMPARE_AND_WRITE, 16, 16, [], note=", no blocks", count=0)


def without_judge(c):
    """Commands that the judge does not support, so that nothing is compared: ORWRITE with ORPROTECT, and FORMAT UNIT with
    FMTPINFO. No disk of Linux supports them, so they are only judged by tests with our own model."""
    block = c.blocks(1)
    commands = {
        "ORWRITE(16)": (sixteen(0x8B, 1 << 5, 8, 1), join(block, c.valid(8, block))),
        "FORMAT UNIT": (bytes([4, 0x90, 0, 0, 0, 0]), bytes([0, 2, 0, 0])),
    }
    for name, (cdb, out) in commands.items():
        status = c.devices[0].send(cdb, out).status
        c.steps += 1
        if status != "5/20/00":
            c.report(f"{name}, which the judge may support now", "status", [status, "not sent"])


LISTS = [
    describe,
    deallocated,
    reads,
    stored_tuples,
    writes,
    received_tuples,
    expected_tags,
    long_commands,
    boundaries,
    without_judge,
]
# LIO doesn't execute VERIFY, and doesn't support the other commands for this.
SCSI_DEBUG_LISTS = [verifies, same_blocks, compared]


def compare(judge, first, second, differences, *options):
    options = dict(option.split("=") for option in options)
    with open(differences) as file:
        lines = (line.strip() for line in file)
        rules = [Rule(line) for line in lines if line and not line.startswith("#")]
    devices = Device(first), Device(second)
    for name in ("block", "last") if "other_type" in options else ("type", "block", "last"):
        values = [getattr(device, name) for device in devices]
        if values[0] != values[1]:
            sys.exit(f"the devices have a different {name}: {values[0]} and {values[1]}")
    sys.stdout.reconfigure(line_buffering=True)
    comparison = Comparison(judge, *devices, rules, int(options.get("cdb", 32)))
    for run in LISTS + (SCSI_DEBUG_LISTS if judge == "scsi_debug" else []):
        run(comparison)
    sys.exit(0 if comparison.finish() else 1)


def write(device, lba, count, seed, protect="0", wrong="0"):
    device, lba, protect = Device(device), int(lba), int(protect)
    blocks = make_blocks(device.block, int(count), int(seed))
    tuples = [tuple_of(block, reference=lba + i, wrong=int(wrong)) for i, block in enumerate(blocks)]
    out = join(blocks, tuples) if protect else b"".join(blocks)
    size = 32 if device.type == 2 and protect else 16
    status = device.send(cdb_of(WRITE, size, lba, len(blocks), protect), out).status
    if status != "good":
        sys.exit(f"cannot write LBA {lba}: {status}")


# ib_iser and ib_srp refuse longer transfers.
MOST_BYTES = 256 << 10


def read_all(device, lba, count):
    """Returns blocks and their protection information, which is not checked."""
    unit = device.block + 8
    size = 32 if device.type == 2 else 16
    rows = []
    for at in range(0, count, MOST_BYTES // unit):
        part = min(count - at, MOST_BYTES // unit)
        outcome = device.send(cdb_of(READ, size, lba + at, part, 3), length=part * unit)
        if outcome.status != "good" or len(outcome.data) != part * unit:
            sys.exit(f"cannot read LBA {lba + at}: {outcome.status}")
        rows += (outcome.data[i : i + unit] for i in range(0, len(outcome.data), unit))
    return [(row[:-8], row[-8:]) for row in rows]


def tuples(device, lba, count):
    for _, own in read_all(Device(device), int(lba), int(count)):
        print(show(own))


def generated(device, lba, count):
    device, lba, written = Device(device), int(lba), 0
    for i, (block, own) in enumerate(read_all(device, lba, int(count))):
        if own == ONES and not any(block):
            continue
        written += 1
        # With type 2, blocks without a known reference tag are not checked.
        application = 0xFFFF if device.type == 2 else 0
        reference = lba + i if device.type == 1 else 0xFFFFFFFF
        valid = tuple_of(block, application, reference)
        if own != valid:
            sys.exit(f"LBA {lba + i} has {show(own)}, not {show(valid)}")
    print(f"{written} of {count} blocks have valid protection information")
    sys.exit(0 if written else 1)


if __name__ == "__main__":
    modes = {"compare": compare, "write": write, "tuples": tuples, "generated": generated}
    modes[sys.argv[1]](*sys.argv[2:])
