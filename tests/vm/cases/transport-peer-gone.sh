#: group: transport
#: about: peers that disappear during transfers: network, device, process
#: limit: 900
two_hosts
trap one_host EXIT
export RISER_CUT="ip link set v0 down" RISER_HEAL="ip link set v0 up; sleep 1"
for test in peer_vanishes peer_closes; do
    on_devices rdma_core:10.99.0.1 roce:10.99.0.2@peer stress::$test
    on_devices roce:10.99.0.2@peer rdma_core:10.99.0.1 stress::$test
done

# One process is killed during a ping. The other must detect this, at the latest when nothing was
# received for the configured timeout (a server that only waits for requests cannot detect it earlier).
# A new pair must then work.
killed() { # role to kill: server or client; command prefix of the server, command prefix of the client
    local who=$1 server=$2 client=$3 at survivor doomed
    at=10.99.0.2
    [ "$server" = roce ] || at=10.99.0.1
    rping_on "$server" server --size 8M --timeout 60s
    local s=$PID
    sleep 1
    rping_on "$client" client $at --count 0 --size 8M --timeout 60s
    local c=$PID
    sleep 5
    doomed=$s survivor=$c
    [ "$who" = server ] || doomed=$c survivor=$s
    kill -0 $doomed && kill -0 $survivor || fail "no pings were completed"
    kill -KILL $doomed
    SECONDS=0
    # The disconnected peer may or may not be treated as an error, depending on the operations in
    # flight.
    ended $survivor any
    echo "$who on $server/$client killed: detected after $SECONDS s"
    rping_on "$server" server
    s=$PID
    sleep 1
    rping_on "$client" client $at --count 10
    ended $PID
    ended $s
}
rping_on() { # provider, arguments; sets PID
    local provider=$1 role=$2
    shift 2
    if [ "$provider" = roce ]; then
        ip netns exec peer "$RISER_BIN/riser" rping "$role" "$@" --addr 10.99.0.2 &
    else
        "$RISER_BIN/riser" rping "$role" "$@" --addr 10.99.0.1 --provider rdma_core &
    fi
    PID=$!
}
for who in server client; do
    killed $who roce rdma_core
    killed $who rdma_core roce
done
nothing_left
