#: group: iwarp
#: about: the port mapper before the kernel's iWARP: riser-iwpmd and rdma-core's iwpmd, with siw
#: limit: 300
#: packets: 10
iwarp_hosts
end() {
    [ -z "${MAPPER:-}" ] || kill "$MAPPER" 2>/dev/null || true
    one_host
}
trap end EXIT

# The port mapper of the kernel's end: mapper ours|theirs. It takes the place of the one before.
mapper() {
    [ -z "${MAPPER:-}" ] || { kill "$MAPPER"; wait "$MAPPER" || true; }
    case $1 in
    ours) RUST_LOG=debug "$RISER_BIN/riser-iwpmd" >>"$KEEP/ours.log" 2>&1 & ;;
    theirs) /usr/sbin/iwpmd --systemd & ;;
    esac
    MAPPER=$!
    wait_for 20 listens_at_3935
}

listens_at_3935() {
    ss -Hlnu sport = :3935 | grep -q .
}

# What an address of the kernel's end is mapped to, as the other end sees it.
asked() {
    on_peer "$RISER_BIN/riser-iwpmd" query 10.99.0.2:40000 "10.99.0.1:$1"
}

is_mapped() {
    [ "$(asked "$1" 2>/dev/null)" = "10.99.0.1:$1" ]
}

is_rejected() {
    local why
    why=$(asked "$1" 2>&1) && return 1
    [[ $why == *"no mapping"* ]]
}

# TCP servers that are no iWARP devices, at the port that an address of the other end is mapped to and at
# one that is not mapped: they see where the kernel connects, and the first bytes that it sends.
cat >/tmp/first-bytes.py <<'PY'
import select, socket
servers = [socket.create_server(("10.99.0.2", port)) for port in (7300, 7175)]
while True:
    for server in select.select(servers, [], [])[0]:
        connection, _ = server.accept()
        first = connection.recv(16).decode("ascii", "replace")
        print(server.getsockname()[1], first, flush=True)
        connection.close()
PY

# The kernel connects to a port of the other end, and comes to this one: comes_to PORT PORT
comes_to() {
    : >/tmp/first-bytes
    timeout 30 rping -c -a 10.99.0.2 -I 10.99.0.1 -p "$1" -C 1 && fail "a connection with a program that closes it"
    wait_for 20 grep -q "^$2 MPA ID Req Frame" /tmp/first-bytes
}

on_peer "$RISER_BIN/riser-iwpmd" --no-kernel --map 10.99.0.2:7174=7300 >/tmp/peer.log 2>&1 &
peer=$!
on_peer python3 /tmp/first-bytes.py >>/tmp/first-bytes &
server=$!
wait_for 20 grep -q 7300 /tmp/peer.log

for kind in ours theirs; do
    mapper $kind

    # The kernel listens: its address is registered, and gone with the listener.
    rping -s -P -a 10.99.0.1 -p 7174 >/tmp/rping-server 2>&1 &
    rping=$!
    wait_for 30 is_mapped 7174

    # Another port mapper takes the mappings over.
    mapper ours
    wait_for 30 is_mapped 7174
    mapper $kind
    wait_for 30 is_mapped 7174

    # A connection of the device with itself: the port mapper asks itself.
    rping -c -a 10.99.0.1 -I 10.99.0.1 -p 7174 -C 20 -V
    kill $rping
    wait $rping || true
    wait_for 30 is_rejected 7174

    # To where the other end's port mapper says, and without a mapping as it is.
    comes_to 7174 7300
    comes_to 7175 7175
done
kill $server $peer
grep "a client of the kernel has registered" "$KEEP/ours.log"
