#: group: sa
#: about: riser-sa for programs on the same and other hosts: paths, sources, groups, restart, invalid setups
#: limit: 240
#: here: yes
#: packets: 12
hosts 2300 a b c
# The path of a socket must be short.
mount -t tmpfs none /mnt

# Starts riser-sa on host a: administrator OPTION …
administrator() {
    : >"$KEEP/a.log"
    ip netns exec a "$RISER_BIN/riser-sa" --no-netlink --addr 10.98.0.1 --socket /mnt/socket "$@" 2>"$KEEP/a.log" &
    SA=$!
    wait_for 60 grep -q 'is running' "$KEEP/a.log"
}

# Runs a program that uses libibumad on a host to query riser-sa: query_from NAME NUMBER COMMAND …
query_from() {
    local host=$1 n=$2
    shift 2
    RISER_SA=10.98.0.1 RISER_LINK_LAYER=infiniband on "$host" \
        timeout 60 "$RISER_BIN/riser" run --addr "10.98.0.$n" -- "$@"
}

# Checks that ib_acme on host a finds a path and verifies it: finds TYPE SOURCE DESTINATION
finds() {
    on a timeout 60 ib_acme -S /mnt/socket -f "$1" -s "$2" -d "$3" -v >/mnt/acme 2>&1
    grep -q "SA verification: success" /mnt/acme
}

# Returns whether other hosts can see a group that was created by one of them.
has_group() {
    query_from c 3 saquery -g >/mnt/groups
    grep -q "MGID.*::ffff:239.255.9.9" /mnt/groups
}

capture a
printf '10.98.0.3 third # a host\n' >/mnt/hosts
administrator --source 10.98.0.77 --hosts /mnt/hosts

# Programs on the same host.
finds i 10.98.0.1 10.98.0.2
grep -q "mtu: 4" /mnt/acme || fail "the MTU differs from the path MTU"
finds g ::ffff:10.98.0.1 ::ffff:10.98.0.3
on a ib_acme -S /mnt/socket -f n -d third -v | grep -q "dgid: ::ffff:10.98.0.3"
# From the additional address that was configured, but not from any other.
finds i 10.98.0.77 10.98.0.2
grep -q "sgid: ::ffff:10.98.0.77" /mnt/acme
finds i 10.98.0.78 10.98.0.2 && fail "accepted a source that is not an address of this host"

# Programs on other hosts, which can see each other's changes.
query_from b 2 saquery --sgid-to-dgid ::ffff:10.98.0.2-::ffff:10.98.0.3 | tee /mnt/path
grep -q "dgid.*::ffff:10.98.0.3" /mnt/path
has_group && fail "found a group that does not exist"
query_from b 2 python3 "$RISER_ROOT/tests/vm/sa.py" group ::ffff:239.255.9.9 ::ffff:10.98.0.2
has_group
query_from c 3 saquery NR >/mnt/nodes
for n in 1 2 3; do grep -q "10.98.0.$n" /mnt/nodes || fail "10.98.0.$n is missing in $(cat /mnt/nodes)"; done

# A second process with the same address or the same socket must fail with an error.
refused on a "$RISER_BIN/riser-sa" --no-netlink --addr 10.98.0.1
cat "$KEEP/refused"
on a ip address add 10.98.0.9/24 dev eth0
refused on a "$RISER_BIN/riser-sa" --no-netlink --addr 10.98.0.9 --socket /mnt/socket
grep -q "/mnt/socket" "$KEEP/refused"

# After it was killed, it starts again immediately with the same socket. Groups are registered by
# hosts, so they must be created again.
kill -KILL $SA
wait $SA || true
administrator
finds i 10.98.0.1 10.98.0.2
has_group && fail "a group was not removed"
query_from b 2 python3 "$RISER_ROOT/tests/vm/sa.py" group ::ffff:239.255.9.9 ::ffff:10.98.0.2
has_group
# tcpdump receives packets with a delay of up to one second.
sleep 1.2
captured
