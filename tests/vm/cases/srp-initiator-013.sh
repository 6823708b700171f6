#: group: srp
#: about: one block from and to fragmented memory
#: limit: 120
PARAMS=ch_count=4
three_disks_rig
head -c 512 /dev/urandom >/tmp/block
dd if=/tmp/block of=/dev/mapper/paths bs=512 oflag=direct status=none
# Reads into, and writes from, buffers of different lengths on different pages.
python3 - "$DISK" <<'P'
import ctypes, fcntl, mmap, os, sys

class Hdr(ctypes.Structure):
    _fields_ = [(n, t) for n, t in (
        ("interface_id", ctypes.c_int), ("dxfer_direction", ctypes.c_int),
        ("cmd_len", ctypes.c_ubyte), ("mx_sb_len", ctypes.c_ubyte),
        ("iovec_count", ctypes.c_ushort), ("dxfer_len", ctypes.c_uint),
        ("dxferp", ctypes.c_void_p), ("cmdp", ctypes.c_void_p), ("sbp", ctypes.c_void_p),
        ("timeout", ctypes.c_uint), ("flags", ctypes.c_uint), ("pack_id", ctypes.c_int),
        ("usr_ptr", ctypes.c_void_p), ("status", ctypes.c_ubyte),
        ("masked_status", ctypes.c_ubyte), ("msg_status", ctypes.c_ubyte),
        ("sb_len_wr", ctypes.c_ubyte), ("host_status", ctypes.c_ushort),
        ("driver_status", ctypes.c_ushort), ("resid", ctypes.c_int),
        ("duration", ctypes.c_uint), ("info", ctypes.c_uint))]

class Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("len", ctypes.c_size_t)]

LENGTHS = [4, 60, 192, 256]
memory = mmap.mmap(-1, 4096 * 2 * len(LENGTHS))
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
offsets = [4096 * 2 * i + 64 * i for i in range(len(LENGTHS))]

def transfer(fd, opcode, direction):
    vec = (Iovec * len(LENGTHS))(*[Iovec(start + o, n) for o, n in zip(offsets, LENGTHS)])
    cdb = (ctypes.c_ubyte * 10)(opcode, 0, 0, 0, 0, 0, 0, 0, 1, 0)
    sense = (ctypes.c_ubyte * 32)()
    h = Hdr(interface_id=ord("S"), dxfer_direction=direction, cmd_len=10, mx_sb_len=32,
            iovec_count=len(LENGTHS), dxfer_len=512, dxferp=ctypes.addressof(vec),
            cmdp=ctypes.addressof(cdb), sbp=ctypes.addressof(sense), timeout=20000, flags=1)
    fcntl.ioctl(fd, 0x2285, h)
    assert (h.status, h.host_status, h.resid) == (0, 0, 0), (h.status, h.host_status, h.resid)

fd = os.open(sys.argv[1], os.O_RDWR)
transfer(fd, 0x28, -3)
got = b"".join(memory[o:o + n] for o, n in zip(offsets, LENGTHS))
assert got == open("/tmp/block", "rb").read(), "read other data"
turned = bytes(b ^ 0xA5 for b in got)
at = 0
for o, n in zip(offsets, LENGTHS):
    memory[o:o + n] = turned[at:at + n]
    at += n
transfer(fd, 0x2A, -2)
open("/tmp/turned", "wb").write(turned)
P
dd if=/dev/mapper/paths bs=512 count=1 iflag=direct status=none | cmp - /tmp/turned
