#: group: transport
#: about: our rping on rdma_core and on the software NIC, both roles, IPv4 and IPv6
#: limit: 900
two_hosts
trap one_host EXIT
# Additional addresses, so that all four runs can be done at the same time.
on_peer ip addr add 10.99.0.3/24 dev v1
on_peer ip addr add fd99::3/64 dev v1 nodad

core_client() { # address on rdma_core, on the software NIC, size, count
    ip netns exec peer "$RISER_BIN/riser" -v rping server --addr "$2" --size 1M 2>"/tmp/rping-$2" &
    local server=$!
    wait_for 30 grep -q listening "/tmp/rping-$2"
    "$RISER_BIN/riser" rping client "$2" --addr "$1" --provider rdma_core --size "$3" --count "$4"
    ended $server
}

core_server() { # address on rdma_core, on the software NIC, size, count
    "$RISER_BIN/riser" -v rping server --addr "$1" --provider rdma_core --size 1M 2>"/tmp/rping-$1" &
    local server=$!
    wait_for 30 grep -q listening "/tmp/rping-$1"
    on_peer "$RISER_BIN/riser" rping client "$1" --addr "$2" --size "$3" --count "$4"
    ended $server
}

for size in 64:10000 1048576:20; do
    at_once "core_client 10.99.0.1 10.99.0.2 ${size/:/ }" "core_server 10.99.0.1 10.99.0.3 ${size/:/ }" \
        "core_client fd99::1 fd99::2 ${size/:/ }" "core_server fd99::1 fd99::3 ${size/:/ }"
done
nothing_left
