#: group: vnic
#: about: members that join late, crash, restart and leave, a restarted manager, hosts behind a member
#: limit: 180
#: here: yes
#: packets: none
hosts 1500 a b c d
member a 10.98.0.1 --manage --interval 500ms --dead-after 2s
member b 10.98.0.2
joined a 1
joined b 2
soon a 2

# A member that joins late. It knows all others after one or two intervals.
sleep 2
member c 10.98.0.3
joined c 3
soon c 1
soon c 2
soon b 3

# Killing a member does not affect other members.
ip netns exec b ping -q -i 0.1 192.168.50.1 >"$KEEP/steady" &
steady=$!
kill -KILL "${MEMBER[c]}"
wait "${MEMBER[c]}" || true
wait_for 10 grep -q 'member timed out' "$KEEP/a.log"
refused on a ping -q -c 1 -W 1 192.168.50.3
# When it returns, other hosts still use its previous address.
member c 10.98.0.3
joined c 3
soon a 3

# After an immediate restart, it's still the same member.
before=$(on c cat /sys/class/net/vnic0/address)
kill -KILL "${MEMBER[c]}"
wait "${MEMBER[c]}" || true
member c 10.98.0.3
joined c 3
wait_for 10 grep -q 'member restarted' "$KEEP/a.log"
soon a 3
[ "$(on c cat /sys/class/net/vnic0/address)" = "$before" ] || fail "the address changed"

# If the user sets another address, this is distributed. Hosts continue to use the old address for
# some time, as on any Ethernet.
on b ip link set vnic0 address 06:11:22:33:44:55
on a ip neighbour flush dev vnic0
soon a 2
on a ip neighbour show 192.168.50.2 | grep -q 06:11:22:33:44:55 || fail "the old address is still in use"

# A host behind a member, whose address is only known from its frames.
ip netns add behind
on b ip link add out type veth peer name eth0 netns behind
on b ip link add bridge type bridge
on b ip link set out master bridge up
on b ip link set vnic0 master bridge
on b ip link set bridge up
on behind ip address add 192.168.50.99/24 dev eth0
on behind ip link set eth0 up
wait_for 10 on a ping -q -c 1 -W 1 192.168.50.99
reaches c 192.168.50.99
on b ip link set vnic0 nomaster
on b ip link set vnic0 up
soon a 2

# Members that know each other continue to work without the manager, and keep their addresses with a
# new manager.
kill -INT $steady
wait $steady || true
grep -q ' 0% packet loss' "$KEEP/steady" || {
    tail -3 "$KEEP/steady"
    lost=$(grep -o '[0-9.]*% packet loss' "$KEEP/steady" | cut -d% -f1)
    # It takes some time to change the address of an interface and its bridge.
    python3 -c "assert float('$lost') < 40"
}
addresses() {
    local host
    for host in b c; do
        on $host cat /sys/class/net/vnic0/address
    done
}
before=$(addresses)
kill -KILL "${MEMBER[a]}"
wait "${MEMBER[a]}" || true
reaches b 192.168.50.3
member a 10.98.0.1 --manage --interval 500ms --dead-after 2s
joined a 1
soon a 2
soon a 3
[ "$(addresses)" = "$before" ] || fail "the addresses changed"

# Another manager is rejected, and a member that only accepts its own manager has no carrier.
member d 10.98.0.4 --manage --switch 9
wait_for 10 grep -q 'rejected a request' "$KEEP/d.log"
wait_for 30 grep -q 'controlled by another manager' "$KEEP/d.log"
reaches b 192.168.50.3
leave d
member d 10.98.0.4 --manager 10.98.0.77
wait_for 15 grep -q 'not configured by a manager' "$KEEP/d.log"
on d grep -q 1 /sys/class/net/vnic0/carrier 2>/dev/null && fail "accepted the configuration of another manager"
leave d

# An interface that is down doesn't accept any frames, and has no carrier if its network was
# removed.
on b ip link set vnic0 down
refused on a ping -q -c 1 -W 1 192.168.50.2
on b ip link set vnic0 up
wait_for 10 on a ping -q -c 1 -W 1 192.168.50.2
on b ip link set eth0 down
wait_for 5 on b grep -q 0 /sys/class/net/vnic0/carrier
on b ip link set eth0 up
wait_for 10 on a ping -q -c 1 -W 1 192.168.50.2

on b ip address del 10.98.0.2/24 dev eth0
wait_for 5 on b grep -q 0 /sys/class/net/vnic0/carrier
on b ip address add 10.98.0.2/24 dev eth0
wait_for 10 on a ping -q -c 1 -W 1 192.168.50.2

# If the user renames an interface, it stays the same member.
on b ip link set vnic0 down
on b ip link set vnic0 name managed0
on b ip link set managed0 up
wait_for 5 grep -q 'the interface was renamed.*managed0' "$KEEP/b.log"
wait_for 10 on a ping -q -c 1 -W 1 192.168.50.2
on b ip link set managed0 down
on b ip link set managed0 name vnic0
on b ip link set vnic0 up
wait_for 10 on a ping -q -c 1 -W 1 192.168.50.2

# An invalid setup must fail with an error.
explained() { # words, host, option…
    local words=$1 host=$2
    shift 2
    refused on "$host" "$RISER_BIN/riser" vnic "$@"
    grep -q "$words" "$KEEP/refused" || {
        cat "$KEEP/refused"
        fail "the log does not contain: $words"
    }
}
explained 'another process has a software NIC' b --addr 10.98.0.2 --name other
explained 'an interface with this name exists' d --addr 10.98.0.4 --name eth0
explained 'is not an address of this host' d --addr 10.98.0.99
on d ip link add small mtu 700 type bridge
on d ip address add 10.97.0.4/24 dev small
on d ip link set small up
explained 'path MTU of 512 bytes' d --addr 10.97.0.4
leave c
on b ip link del vnic0
wait "${MEMBER[b]}" && fail "a member without an interface continues to run"
# The member uses the name that it had at the manager's last request.
grep -Eq '(vnic|managed)0 was deleted' "$KEEP/b.log"
leave a
