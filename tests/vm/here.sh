# Functions for cases that run on this machine in separate namespaces (xtask/src/interop/here.rs).
# All processes exit with the case.
set -euo pipefail

ip link set lo up
# Network namespaces are identified by files, so we use a separate directory for the case.
mkdir -p /run/netns
mount -t tmpfs none /run/netns

. "$RISER_ROOT/tests/vm/common.sh"

# Runs a command, which must fail.
refused() {
    if "$@" >"$KEEP/refused" 2>&1; then
        cat "$KEEP/refused"
        fail "command succeeded: $*"
    fi
}

# Runs a command on a host: on NAME COMMAND…
on() {
    local host=$1
    shift
    ip netns exec "$host" "$@"
}

# Creates hosts on one switch: hosts MTU NAME…, with the addresses 10.98.0.1 and fd98::1, 10.98.0.2,
# … on eth0.
hosts() {
    local mtu=$1 n=0 host
    shift
    # Without a router there are no queries for group members, so the switch must not use snooping.
    ip link add switch type bridge mcast_snooping 0
    ip link set switch mtu "$mtu" up
    for host; do
        n=$((n + 1))
        ip netns add "$host"
        ip link add "to-$host" mtu "$mtu" type veth peer name eth0 netns "$host" mtu "$mtu"
        ip link set "to-$host" master switch up
        on "$host" ip link set lo up
        on "$host" ip link set eth0 up
        on "$host" ip address add "10.98.0.$n/24" dev eth0
        on "$host" ip address add "fd98::$n/64" dev eth0 nodad
    done
}

# Adds a host to the virtual Ethernet: member NAME ADDRESS OPTION… Its process ID is in
# ${MEMBER[NAME]}, and its log is in the log directory.
declare -A MEMBER
member() {
    local host=$1 addr=$2
    shift 2
    ip netns exec "$host" "$RISER_BIN/riser" -v vnic --addr "$addr" "$@" \
        >>"$KEEP/$host.out" 2>>"$KEEP/$host.log" &
    MEMBER[$host]=$!
}

# Waits until the interface of a host has a carrier, and adds usable addresses: joined NAME NUMBER
joined() {
    local host=$1 n=$2
    wait_for 15 on "$host" grep -q 1 /sys/class/net/vnic0/carrier
    on "$host" ip address add "192.168.50.$n/24" dev vnic0
    on "$host" ip address add "fd50::$n/64" dev vnic0 nodad
}

# Checks that a host can reach another over the virtual Ethernet: reaches NAME ADDRESS OPTION…
reaches() {
    local host=$1 address=$2
    shift 2
    on "$host" ping -q -c 3 -i 0.2 -W 2 "$@" "$address"
}

# Waits until both addresses of a host can be reached: soon NAME NUMBER
soon() {
    wait_for 15 on "$1" ping -q -c 1 -W 1 "192.168.50.$2"
    wait_for 15 on "$1" ping -q -c 1 -W 1 "fd50::$2"
}

# Captures RoCE packets of a host: capture NAME
capture() {
    tcpdump -Z root -i "to-$1" -s 1500 -c 100000 -U -w "$KEEP/$1.pcap" udp port 4791 2>/dev/null &
    CAPTURE=$!
    wait_for 10 test -s "$KEEP/$1.pcap"
}

# Stops the capture.
captured() {
    kill "$CAPTURE"
    wait "$CAPTURE" || true
}

# Stops a member normally: leave NAME
leave() {
    kill -TERM "${MEMBER[$1]}"
    wait "${MEMBER[$1]}" || fail "member $1 exited with status $?"
}
