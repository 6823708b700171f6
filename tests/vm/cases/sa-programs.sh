#: group: sa
#: about: riser-sa for programs of its own host and of others: paths, sources, groups, a restart, mistakes
#: limit: 240
#: here: yes
#: packets: 12
hosts 2300 a b c
# Sockets have short names.
mount -t tmpfs none /mnt

# Starts riser-sa on host a: administrator OPTION …
administrator() {
    : >"$KEEP/a.log"
    ip netns exec a "$RISER_BIN/riser-sa" --no-netlink --addr 10.98.0.1 --socket /mnt/socket "$@" 2>"$KEEP/a.log" &
    SA=$!
    wait_for 60 grep -q answers "$KEEP/a.log"
}

# A program with libibumad on a host, which asks it: asks NAME NUMBER COMMAND …
asks() {
    local host=$1 n=$2
    shift 2
    RISER_SA=10.98.0.1 RISER_LINK_LAYER=infiniband on "$host" \
        timeout 60 "$RISER_BIN/riser" run --addr "10.98.0.$n" -- "$@"
}

# ib_acme on host a finds a path, and has it verified: finds TYPE SOURCE DESTINATION
finds() {
    on a timeout 60 ib_acme -S /mnt/socket -f "$1" -s "$2" -d "$3" -v >/mnt/acme 2>&1
    grep -q "SA verification: success" /mnt/acme
}

# Whether hosts see a group that one of them has made.
has_group() {
    asks c 3 saquery -g >/mnt/groups
    grep -q "MGID.*::ffff:239.255.9.9" /mnt/groups
}

capture a
printf '10.98.0.3 third # a host\n' >/mnt/hosts
administrator --source 10.98.0.77 --hosts /mnt/hosts

# The own host's programs.
finds i 10.98.0.1 10.98.0.2
grep -q "mtu: 4" /mnt/acme || fail "not the MTU of the path"
finds g ::ffff:10.98.0.1 ::ffff:10.98.0.3
on a ib_acme -S /mnt/socket -f n -d third -v | grep -q "dgid: ::ffff:10.98.0.3"
# From an address that it was given as well, and from no other.
finds i 10.98.0.77 10.98.0.2
grep -q "sgid: ::ffff:10.98.0.77" /mnt/acme
finds i 10.98.0.78 10.98.0.2 && fail "a source that is no address of this host"

# Programs of other hosts: what one does is seen by the other.
asks b 2 saquery --sgid-to-dgid ::ffff:10.98.0.2-::ffff:10.98.0.3 | tee /mnt/path
grep -q "dgid.*::ffff:10.98.0.3" /mnt/path
has_group && fail "a group that none has made"
asks b 2 python3 "$RISER_ROOT/tests/vm/sa.py" group ::ffff:239.255.9.9 ::ffff:10.98.0.2
has_group
asks c 3 saquery NR >/mnt/nodes
for n in 1 2 3; do grep -q "10.98.0.$n" /mnt/nodes || fail "no host 10.98.0.$n in $(cat /mnt/nodes)"; done

# A second one at the address, or at the socket, says why it does not start.
refused on a "$RISER_BIN/riser-sa" --no-netlink --addr 10.98.0.1
cat "$KEEP/refused"
on a ip address add 10.98.0.9/24 dev eth0
refused on a "$RISER_BIN/riser-sa" --no-netlink --addr 10.98.0.9 --socket /mnt/socket
grep -q "/mnt/socket" "$KEEP/refused"

# Killed, it starts again at once, on the same socket. Groups are what hosts have told it, and are made again.
kill -KILL $SA
wait $SA || true
administrator
finds i 10.98.0.1 10.98.0.2
has_group && fail "it has kept a group"
asks b 2 python3 "$RISER_ROOT/tests/vm/sa.py" group ::ffff:239.255.9.9 ::ffff:10.98.0.2
has_group
# It gets packets a second late.
sleep 1.2
captured
