# Functions for the cases. Every case runs as root in the guest, after this file.
set -euo pipefail

IMAGES=/dev/shm
KEEP=/vm/keep
mkdir -p "$KEEP"

# Prints why and ends the case as failed.
fail() {
    echo "FAILED: $*" >&2
    exit 1
}

# Waits until a command succeeds, for so many seconds.
wait_for() {
    local seconds=$1
    shift
    local end=$((SECONDS + seconds))
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $end ] || fail "waited $seconds s for: $*"
        sleep 0.2
    done
}

# An rdma_rxe device on one end of a veth pair; the other end lies in network namespace `peer`,
# where the software NIC runs. Addresses: rxe 10.99.0.1 and fd99::1, peer 10.99.0.2 and fd99::2.
two_hosts() {
    local mtu=${1:-4500}
    modprobe -a veth rdma_rxe rdma_ucm ib_umad ib_uverbs
    ip netns add peer
    ip link add v0 type veth peer name v1
    ip link set v1 netns peer
    ip link set v0 mtu "$mtu" up
    ip -n peer link set v1 mtu "$mtu" up
    ip -n peer link set lo up
    ip addr add 10.99.0.1/24 dev v0
    ip -n peer addr add 10.99.0.2/24 dev v1
    # IPv6 needs links that carry 1280 bytes.
    if [ "$mtu" -ge 1280 ]; then
        ip addr add fd99::1/64 dev v0 nodad
        ip -n peer addr add fd99::2/64 dev v1 nodad
    fi
    rdma link add rxe0 type rxe netdev v0
    wait_for 20 gid_is_there
}

gid_is_there() {
    grep -q '0a63:0001' /sys/class/infiniband/rxe0/ports/1/gids/* 2>/dev/null
}

# Undoes `two_hosts`.
one_host() {
    rdma link delete rxe0 2>/dev/null || true
    ip netns delete peer 2>/dev/null || true
    ip link delete v0 2>/dev/null || true
}

# Runs a command where the software NIC lives.
on_peer() {
    ip netns exec peer "$@"
}

# Captures what passes the veth pair into the case's folder.
capture() {
    tcpdump -i v0 -s 160 -U -w "$KEEP/packets.pcap" udp port 4791 2>/dev/null &
    CAPTURE=$!
}

end_capture() {
    [ -n "${CAPTURE:-}" ] && kill "$CAPTURE" 2>/dev/null && wait "$CAPTURE" 2>/dev/null || true
}

# Starts riserd in namespace `peer` with the configuration on standard input, and waits until it has
# opened its device. Its log is kept.
serve() {
    cat >/tmp/riserd.yaml
    serve_again
}

# Starts riserd once more with the same configuration.
serve_again() {
    on_peer "$RISER_BIN/riserd" run --config /tmp/riserd.yaml >>"$KEEP/riserd.log" 2>&1 &
    RISERD=$!
    wait_for 30 riserd_is_up
}

riserd_is_up() {
    kill -0 "$RISERD" && [ -n "$(on_peer ss -Hulnp 'sport = :4791')" ]
}

# Ends riserd as systemd would; it must end by itself and without an error.
stop_serving() {
    kill -TERM "$RISERD"
    wait "$RISERD"
}

# Ends riserd without a chance to say good-bye.
kill_serving() {
    kill -KILL "$RISERD"
    wait "$RISERD" || true
}

# One or more disks for the kernel's ib_srp: serve_disks SIZE_MIB [COUNT] [extra configuration line …]
GUID=0200c0ffee000001
serve_disks() {
    local size=$1 count=${2:-1} i
    shift; shift || true
    {
        echo "backends:"
        for ((i = 0; i < count; i++)); do
            echo "  disk$i: { kind: file, path: $IMAGES/disk$i.img, size: ${size}MiB, create: true, serial: RIG-$i }"
        done
        echo "targets:"
        echo "  - name: rig"
        echo "    portals: [{ protocol: srp, listen: 10.99.0.2, ioc_guid: 0x$GUID }]"
        echo "    luns:"
        for ((i = 0; i < count; i++)); do echo "      $i: disk$i"; done
        echo "    access: open"
        for line in "$@"; do echo "$line"; done
    } | serve
}

# Loads ib_srp with the module parameters given, and waits for its device.
load_srp() {
    modprobe -r ib_srp 2>/dev/null || true
    modprobe sd_mod
    modprobe sg
    modprobe ib_srp "$@"
    wait_for 10 test -e /sys/class/infiniband_srp/srp-rxe0-1/add_target
}

# Logs the kernel in; arguments are further add_target parameters. Sets DISK to LUN 0's device.
srp_login() {
    local IFS=,
    echo "id_ext=$GUID,ioc_guid=$GUID,dest=10.99.0.2:5555${*:+,$*}" >/sys/class/infiniband_srp/srp-rxe0-1/add_target
    unset IFS
    wait_for 60 find_disk 0
    find_disk 0
}

# Sets DISK to the SCSI disk with a LUN.
find_disk() {
    local d
    for d in /sys/class/scsi_device/*:"$1"/device/block/*; do
        [ -e "$d" ] || continue
        DISK=/dev/$(basename "$d")
        [ -b "$DISK" ] && return 0
    done
    return 1
}

# Logs the kernel out of every target.
srp_logout() {
    local p
    for p in /sys/class/srp_remote_ports/*; do
        [ -e "$p/delete" ] && echo 1 >"$p/delete"
    done
    wait_for 30 no_hosts
}

# Whether the last host of ib_srp has gone: only those have this attribute.
no_hosts() {
    ! ls /sys/class/scsi_host/host*/ch_count >/dev/null 2>&1
}

# Leaves nothing behind: what every SRP case does at its end.
srp_clean() {
    end_capture
    srp_logout || true
    modprobe -r ib_srp 2>/dev/null || true
    [ -n "${RISERD:-}" ] && kill -KILL "$RISERD" 2>/dev/null && wait "$RISERD" 2>/dev/null
    rm -f "$IMAGES"/disk*.img
    one_host
}

# Verified random I/O on a device: verify DEVICE SIZE [fio arguments …]
verify() {
    local device=$1 size=$2
    shift 2
    fio --name=verify --filename="$device" --size="$size" --rw=randwrite --direct=1 \
        --ioengine=libaio --iodepth=16 --verify=crc32c --verify_fatal=1 --randrepeat=0 \
        --output="$KEEP/fio-$(date +%s%N).txt" "$@"
}

# Runs the transport's tests on two devices; what follows the two names are words that choose tests.
on_devices() {
    local a=$1 b=$2
    shift 2
    (cd /tmp && RISER_SUITE="$a $b" "$RISER_TESTS/devices" "$@")
}

# Fails if anything but the kernel's own queue pair 1 is left on the RDMA device.
nothing_left() {
    local left
    left=$(rdma resource show)
    echo "$left"
    grep -q 'pd 1 cq 1 qp 1 cm_id 0 mr 0 ctx 0 srq 0' <<<"$left" || fail "objects are left"
}
