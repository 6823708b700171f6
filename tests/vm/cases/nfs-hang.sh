#: group: nfs
#: about: the server of an NFS mount used for one of two disks is disconnected under load and reconnected
#: limit: 300
#: packets: none
IQN=iqn.2026-01.com.example:rig
DISKS=iscsi://127.0.0.1/$IQN
MOUNT=/mnt/nfs
PATH=$RISER_BIN:$PATH

hang_clean() {
    set +e
    ip -n files link set n1 up
    kill -KILL $(jobs -p) "${RISERD:-}" 2>/dev/null
    umount -f -l $MOUNT 2>/dev/null
    echo 0 >/proc/fs/nfsd/threads
    umount /proc/fs/nfsd
    ip netns delete files
    rm -rf $IMAGES/export $IMAGES/healthy.img /var/lib/riserd
}
trap hang_clean EXIT

# Starts the kernel's NFS server in a namespace. The caches contain the entries that would be added
# by rpc.mountd: one export with identifier 0 for one client, until 2038.
start_nfsd() {
    mkdir -p $IMAGES/export
    ip netns add files
    ip -n files link set lo up
    ip link add n0 type veth peer name n1 netns files
    ip addr add 10.98.0.1/24 dev n0
    ip link set n0 up
    ip -n files addr add 10.98.0.2/24 dev n1
    ip -n files link set n1 up
    # The server is shut down with the last mount of nfsd, so this must not use a new mount namespace.
    nsenter --net=/run/netns/files bash -euo pipefail <<END
mount -t nfsd nfsd /proc/fs/nfsd
cd /proc/net/rpc
until=2147483647
echo "nfsd 10.98.0.1 \$until rig" >auth.unix.ip/channel
# INSECURE_PORT, NOSUBTREECHECK and FSID, without user mapping.
echo "rig $IMAGES/export \$until 9218 65534 65534 0" >nfsd.export/channel
echo "rig 1 \\x00000000 \$until $IMAGES/export" >nfsd.fh/channel
echo "-2 -3 +4 +4.2" >/proc/fs/nfsd/versions
# The minimum of both times is 10 s.
echo 10 >/proc/fs/nfsd/nfsv4gracetime
echo 10 >/proc/fs/nfsd/nfsv4leasetime
echo 4 >/proc/fs/nfsd/threads
END
}

# Random writes with verification for this number of seconds, in the background: load LUN SECONDS
load() {
    riser --timeout 240s bench $DISKS/$1 --rw randwrite --verify --runtime "$2s" --warm-up 0s --depth 8 --overwrite -o json >"$KEEP/load-$1.json" &
    LOAD=$!
}

operations() {
    python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["jobs"][0]["write"]["total_ios"])' "$KEEP/load-$1.json"
}

reports_hang() {
    riserd status | grep "HANGING: .*remote"
}

modprobe -a veth nfsd nfsv4
start_nfsd
mkdir -p $MOUNT
mount -i -t nfs4 -o vers=4.2,proto=tcp,hard,addr=10.98.0.2,clientaddr=10.98.0.1 10.98.0.2:/ $MOUNT
# The server opens no files during its grace period.
touch $MOUNT/ready
serve <<END
backends:
  remote: { kind: file, path: $MOUNT/disk.img, size: 64MiB, create: true }
  healthy: { kind: file, path: $IMAGES/healthy.img, size: 64MiB, create: true }
targets:
  - name: rig
    iqn: $IQN
    portals: [{ protocol: iscsi, listen: 127.0.0.1 }]
    luns: { 0: remote, 1: healthy }
    access: open
workers: { count: 1 }
END

echo "--- both disks are used"
load 0 5
wait $LOAD
operations 0

echo "--- the server is disconnected"
load 0 30
REMOTE=$LOAD
sleep 3
ip -n files link set n1 down
wait_for 60 reports_hang
load 1 10
wait $LOAD || fail "the load on the healthy disk failed"
[ "$(operations 1)" -gt 100 ] || fail "the healthy disk is delayed"
reports_hang || fail "the server is still disconnected"
# A new session must also be served.
riser bench $DISKS/1 --rw randread --runtime 1s --warm-up 0s
! riserd upgrade || fail "an upgrade started while a disk hangs"
riser bench $DISKS/1 --rw randread --runtime 1s --warm-up 0s

echo "--- the server is reconnected"
ip -n files link set n1 up
wait $REMOTE || fail "the load on the mount failed"
operations 0
wait_for 60 sh -c "! '$RISER_BIN/riserd' status | grep HANGING"
kill -TERM "$RISERD"
wait "$RISERD"
