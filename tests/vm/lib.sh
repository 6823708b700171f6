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
    ip addr add fd99::1/64 dev v0 nodad
    ip -n peer addr add fd99::2/64 dev v1 nodad
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
