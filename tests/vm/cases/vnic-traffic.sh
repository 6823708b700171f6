#: group: vnic
#: about: three members of a virtual Ethernet: ping, arping, groups, VLANs with priorities, TCP and UDP
#: limit: 180
#: short: yes
#: here: yes
hosts 1500 a b c
capture a
member a 10.98.0.1 --manage --switch 100
member b 10.98.0.2 --manager 10.98.0.1
member c 10.98.0.3
n=0
for host in a b c; do
    n=$((n + 1))
    joined $host $n
done
for pair in a:2 a:3 b:1 b:3 c:1 c:2; do
    soon ${pair%:*} ${pair#*:}
    reaches ${pair%:*} 192.168.50.${pair#*:}
    reaches ${pair%:*} fd50::${pair#*:}
done

# The address of a port contains its LID, which is the end of 10.98.0.2, and must be used in
# responses from its host.
on b cat /sys/class/net/vnic0/address | grep -q '^02:00:00:02:00:62$' || fail "unexpected address"
on a arping -I vnic0 -c 3 -W 1 192.168.50.3

# All members must receive broadcast and multicast.
on a sysctl -q -w net.ipv4.icmp_echo_ignore_broadcasts=0
on b sysctl -q -w net.ipv4.icmp_echo_ignore_broadcasts=0
on c sysctl -q -w net.ipv4.icmp_echo_ignore_broadcasts=0
on a ping -c 3 -i 0.3 -b 192.168.50.255 >"$KEEP/broadcast" || fail "no response to a broadcast"
for n in 2 3; do
    grep -q "from 192.168.50.$n" "$KEEP/broadcast" || fail "no response to a broadcast from 192.168.50.$n"
done
on a ping -c 3 -i 0.3 -I vnic0 ff02::1 >"$KEEP/group" || fail "no response from the group"
[ "$(grep -o 'from fe80[^%]*' "$KEEP/group" | sort -u | wc -l)" -eq 3 ] || fail "not all members of the group responded"

# Frames with a VLAN tag must be received without changes, for all priorities and lengths. We use
# raw sockets, because some kernels don't support VLANs (vnic-vlan uses a kernel that does).
cat >"$KEEP/vlan.py" <<'PY'
import socket, struct, sys
role, peer = sys.argv[1], bytes.fromhex(sys.argv[2].replace(":", ""))
TYPE, PACKET, AUXDATA = 0x88b5, 263, 8
wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
wire.bind(("vnic0", 0))
wire.setsockopt(PACKET, AUXDATA, 1)
wire.settimeout(10)
own = wire.getsockname()[4]

def tagged():
    """Returns the next frame of the test with its tag, which the kernel passes separately."""
    while True:
        frame, beside, _, address = wire.recvmsg(2000, 100)
        if frame[12:14] != struct.pack(">H", TYPE) or address[2] == socket.PACKET_OUTGOING:
            continue
        tags = [struct.unpack_from("IIIHHH", data)[5] for _, kind, data in beside if kind == AUXDATA]
        return frame[6:12], tags[0], frame[14:]

if role == "respond":
    print("ready", flush=True)
for n in range(16):
    tci = (n % 8) << 13 | 7
    data = bytes([n]) * (1496 if n > 7 else 46)
    frame = peer + own + struct.pack(">HHH", 0x8100, tci, TYPE) + data
    if role == "ask":
        wire.send(frame)
    source, tag, got = tagged()
    assert (source, tag, got[: len(data)]) == (peer, tci, data), (n, source, tag, got[:4])
    if role == "respond":
        wire.send(frame)
PY
mac() { on "$1" cat /sys/class/net/vnic0/address; }
on b timeout 30 python3 "$KEEP/vlan.py" respond "$(mac a)" >"$KEEP/responder" &
responder=$!
wait_for 10 grep -q ready "$KEEP/responder"
on a timeout 30 python3 "$KEEP/vlan.py" ask "$(mac b)"
wait $responder
# The service class for a priority is a DSCP class selector.
sleep 1
tshark -r "$KEEP/a.pcap" -Y 'ip.dsfield.dscp == 40' 2>/dev/null | grep -q RRoCE ||
    fail "no packet has the service class of priority 5"

# Here, the maximum frame size needs two packets.
reaches a 192.168.50.2 -M do -s 1472
captured

# Wireshark can decode the management datagrams in Omni-Path packets, so we convert them: an ERF
# record, the link header (9B), and the RoCE packet from BTH to ICRC for queue pair 1.
python3 - "$KEEP/a.pcap" "$KEEP/opa.pcap" <<'PY'
import struct, sys
source, out = open(sys.argv[1], "rb"), open(sys.argv[2], "wb")
source.read(24)
out.write(struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 65535, 197))
while head := source.read(16):
    length, whole = struct.unpack("<8xII", head)
    packet = source.read(length)
    roce = packet[14 + 20 + 8 :]
    if packet[12:14] != b"\x08\x00" or length != whole or roce[20:23] != b"\x80\x34\x80":
        continue
    roce = roce[:5] + b"\0\0\1" + roce[8:17] + b"\0\0\1" + roce[20:]
    link = struct.pack(">BBHHH", 0, 2, 5, (8 + len(roce)) // 4, 1) + roce
    record = bytes(8) + struct.pack(">BBHHH", 29, 0, 16 + len(link), 0, len(link)) + link
    out.write(head[:8] + struct.pack("<II", len(record), len(record)) + record)
PY
tshark -r "$KEEP/opa.pcap" -T fields -e opa.mad.mgmtclass -e opa.mad.method -e opa.mad.attributeid \
    -e opa.mad.status -e _ws.malformed 2>/dev/null | sort | uniq -c | tee "$KEEP/mads"
# Queries and responses, claims, configurations, tables, addresses and traps, none of them
# malformed.
for mad in '0x01.0x0001' '0x81.0x0001' '0x02.0x0001' '0x02.0x0011' '0x81.0x0011' '0x02.0x0012' \
    '0x81.0x0012' '0x81.0x0013' '0x05.0x0002' '0x02.0xff12'; do
    grep -Eq "0x34.$mad.0x0000\s*$" "$KEEP/mads" || fail "Wireshark found no datagram $mad"
done
[ "$(grep -Ecv '0x34.0x[0-9a-f]{2}.0x[0-9a-f]{4}.0x0000\s*$' "$KEEP/mads")" -eq 0 ] || fail "a datagram is malformed"
rm "$KEEP/opa.pcap"

on b iperf3 -s -1 -D -p 5201
sleep 0.5
on a iperf3 -c 192.168.50.2 -p 5201 -t 3 -J >"$KEEP/tcp.json"
on c iperf3 -s -1 -D -p 5202
sleep 0.5
on a iperf3 -u -b 20M -c 192.168.50.3 -p 5202 -t 3 -J >"$KEEP/udp.json"
python3 - "$KEEP/tcp.json" "$KEEP/udp.json" <<'PY'
import json, sys
tcp, udp = (json.load(open(path))["end"] for path in sys.argv[1:])
rate = tcp["sum_received"]["bits_per_second"] / 1e6
lost = udp["sum"]["lost_percent"]
print(f"result: TCP {rate:.0f} Mbit/s, UDP loss {lost:.1f} % at 20 Mbit/s")
assert rate > 10, rate
assert lost < 20, lost
PY

for host in c b a; do
    leave $host
    grep -q 'frames sent' "$KEEP/$host.out" || fail "$host prints no statistics"
done
on a ip link show vnic0 2>/dev/null && fail "the interface was not removed"
exit 0
