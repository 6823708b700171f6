#: group: transport
#: about: rdma-core's rping over rdma_rxe and ours on rdma_core, both roles, IPv4 and IPv6
#: limit: 900
#: packets: none
dummy_host
trap 'ip link delete d0' EXIT

as_client() { # server address, our address, port, size, count
    rping -s -a "$1" -p "$3" -C "$5" -S "$4" &
    local server=$!
    sleep 2
    "$RISER_BIN/riser" rping client "$1" --addr "$2" --port "$3" --provider rdma_core --count "$5" --size "$4"
    wait $server || true
}

as_server() { # client address, our address, port, size, count
    "$RISER_BIN/riser" -v rping server --addr "$2" --port "$3" --provider rdma_core 2>"/tmp/rping-$3" &
    local server=$!
    wait_for 30 grep -q listening "/tmp/rping-$3"
    rping -c -a "$2" -I "$1" -p "$3" -C "$5" -S "$4" -V
    ended $server
}

for size in 64:10000 65535:100; do
    at_once "as_client 10.99.0.1 10.99.0.2 7001 ${size/:/ }" "as_server 10.99.0.1 10.99.0.2 7002 ${size/:/ }" \
        "as_client fd99::1 fd99::2 7003 ${size/:/ }" "as_server fd99::1 fd99::2 7004 ${size/:/ }"
done
nothing_left
