#: group: iwarp
#: about: riserd on rdma_core over siw: ib_iser logs in, verifies and logs out; each READ has its own sink
#: limit: 400
TRANSPORT=iser CORE=yes
. /vm/iscsi.sh
iwarp_hosts
trap iscsi_clean EXIT

# Returns whether riserd has no regions, queue pairs and completion queues on its device.
no_objects() {
    rdma resource show siw1 | tee /tmp/resources
    grep -q 'cq 0 qp 0 .* mr 0 ' /tmp/resources
}

serve <<END
backends:
  disk0: { kind: file, path: $IMAGES/disk0.img, size: 64MiB, create: true, serial: RIG-0 }
targets:
  - name: rig
    iqn: $IQN
    portals: [{ protocol: iser, listen: 10.99.0.2 }]
    luns: { 0: disk0 }
    access: open
END
no_objects || fail "objects before the login"
start_iscsid
# There is no TCP portal on this address that could be used for discovery.
iscsi_node
iscsi_login
[ "$(blockdev --getsize64 "$DISK")" = $((64 << 20)) ] || fail "unexpected size"
verify "$DISK" 8m --bs=4k
verify "$DISK" 32m --bs=256k --iodepth=8
# Unaligned lengths, and reads from the file instead of the initiator's memory.
dd if=/dev/urandom of=/tmp/written bs=1k count=5003 status=none
dd if=/tmp/written of="$DISK" bs=64k oflag=direct conv=notrunc status=none
cmp -n $((5003 << 10)) /tmp/written "$IMAGES/disk0.img"
echo 3 >/proc/sys/vm/drop_caches
dd if="$DISK" bs=64k count=79 iflag=direct status=none | cmp -n $((5003 << 10)) - /tmp/written
iscsi_logout
wait_for 10 no_connections
wait_for 10 no_objects

# The connection ends while data are written.
iscsi_login
fio --name=cut --filename="$DISK" --size=32m --rw=randwrite --bs=64k --direct=1 --ioengine=libaio --iodepth=16 \
    --time_based --runtime=60 --allow_file_create=0 --output="$KEEP/fio-cut.txt" &
LOAD=$!
has_writes() {
    [ "$(awk '{ print $5 }' "/sys/block/${DISK#/dev/}/stat")" -gt 100 ]
}
wait_for 60 has_writes
iscsiadm -m node -T $IQN -u || true
wait_for 30 no_disk
wait "$LOAD" || true
wait_for 10 no_connections
wait_for 10 no_objects
iscsi_login
verify "$DISK" 4m --bs=64k
iscsi_logout
stop_serving
end_capture
reads=$(python3 "$RISER_ROOT/tests/vm/sinks.py" "$KEEP/packets.pcap" 10.99.0.2)
echo "result: $reads READs were captured, and each had its own sink"
[ "$reads" -ge 100 ] || fail "too few READs"
