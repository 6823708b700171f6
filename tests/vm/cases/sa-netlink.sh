#: group: sa
#: about: riser-sa with the kernel's netlink: group, acknowledgements, missing capabilities
#: limit: 240
#: short: yes
#: packets: none
modprobe ib_core
end() {
    kill -KILL "${STARTED[@]}" 2>/dev/null || true
    ip netns delete other 2>/dev/null || true
}
STARTED=()
trap end EXIT

# Checks that it starts and keeps running: stays OPTION …
stays() {
    RISER_LOG=debug "$RISER_BIN/riser-sa" --addr 127.0.0.1 "$@" >/tmp/sa.log 2>&1 &
    SA=$!
    STARTED+=($!)
    wait_for 60 grep -q ' is running .*kernel=true' /tmp/sa.log
    cat /tmp/sa.log
}

# Checks that it exits immediately with an error: does_not_start WORDS COMMAND …
does_not_start() {
    local words=$1 status=0
    shift
    timeout 60 "$@" "$RISER_BIN/riser-sa" --addr 127.0.0.1 >/tmp/sa.log 2>&1 || status=$?
    cat /tmp/sa.log
    [ $status = 1 ] || fail "exit status $status, expected 1"
    grep -q -- "$words" /tmp/sa.log || fail "the output does not contain '$words'"
}

# Prints the number of NETLINK_RDMA (20) sockets of a process that have joined the kernel's group
# for local services: members PID
members() {
    awk -v pid="$1" '$2 == 20 && $3 == pid && $4 == "00000004"' /proc/net/netlink | wc -l
}

stays
[ "$(members $SA)" = 1 ] || {
    cat /proc/net/netlink
    fail "the process is not a member of the kernel's group"
}
# Another process with a separate address also joins the group.
"$RISER_BIN/riser-sa" --addr 127.0.0.2 >/tmp/other.log 2>&1 &
STARTED+=($!)
wait_for 60 grep -q 'is running' /tmp/other.log
# Restart it immediately.
kill -KILL $SA
wait $SA || true
stays --kernel-timeout 2500
kill $SA
wait $SA || true

# The kernel acknowledges the first message, which is the timeout, or a response to an unknown
# request.
acknowledged() {
    local messages=$1 sa
    shift
    strace -f -qq -e trace=sendto,recvfrom,sendmsg,recvmsg -o /tmp/strace.log \
        "$RISER_BIN/riser-sa" --addr 127.0.0.1 "$@" >/tmp/sa.log 2>&1 &
    sa=$!
    STARTED+=($sa)
    wait_for 120 grep -q 'is running' /tmp/sa.log
    grep -E 'nlmsg_type=(0x10|NLMSG_ERROR)' /tmp/strace.log || true
    grep -Eq "$messages" /tmp/strace.log || fail "message $messages is missing"
    grep -q 'NLMSG_ERROR.*error=0' /tmp/strace.log || fail "the acknowledgement is missing"
    pkill -P $sa
    wait $sa || true
}
acknowledged 'sendto.*nlmsg_type=0x1000'
acknowledged 'sendto.*nlmsg_type=0x1001' --kernel-timeout 100
acknowledged 'sendto.*nlmsg_type=0x1001' --kernel-timeout 200000

# Without the capability, and in a namespace where the kernel doesn't send queries.
does_not_start CAP_NET_ADMIN setpriv --reuid 65534 --regid 65534 --clear-groups
does_not_start CAP_NET_ADMIN setpriv --bounding-set -net_admin --inh-caps -net_admin
ip netns add other
ip -n other link set lo up
does_not_start "initial network namespace" ip netns exec other
# It must still respond to other hosts there.
ip netns exec other "$RISER_BIN/riser-sa" --addr 127.0.0.1 --no-netlink >/tmp/sa.log 2>&1 &
STARTED+=($!)
wait_for 60 grep -q ' is running .*kernel=false' /tmp/sa.log
