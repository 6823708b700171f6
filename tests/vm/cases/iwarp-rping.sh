#: group: iwarp
#: about: rdma-core's rping over siw and ours over TCP, both roles, IPv4 and IPv6
#: limit: 600
iwarp_hosts
trap one_host EXIT

# Our client with the server of rdma-core's rping.
as_client() { # server address, our address, size, count
    rping -s -a "$1" -C "$4" -S "$3" &
    local server=$!
    sleep 2
    on_peer "$RISER_BIN/riser" rping client "$1" --provider iwarp --addr "$2" --count "$4" --size "$3"
    wait $server || true
}

# Our server, which exits after its client has disconnected.
as_server() { # our address, size, count
    ip netns exec peer "$RISER_BIN/riser" -v rping server --provider iwarp --addr "$1" 2>"/tmp/rping-$1" &
    local server=$!
    wait_for 30 grep -q listening "/tmp/rping-$1"
    rping -c -a "$1" -C "$3" -S "$2" -V
    ended $server
}

for size in 64:1000 65535:50; do
    as_client 10.99.0.1 10.99.0.2 ${size/:/ }
    as_server 10.99.0.2 ${size/:/ }
    as_client fd99::1 fd99::2 ${size/:/ }
    as_server fd99::2 ${size/:/ }
done
