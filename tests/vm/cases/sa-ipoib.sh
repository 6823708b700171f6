#: group: sa
#: about: the kernel's IPoIB: groups at riser-sa by MADs, paths and GIDs of addresses behind a gateway by netlink
#: limit: 300
#: packets: 16
. "$RISER_ROOT/tests/vm/sa.sh"
ib_hosts
trap no_ib_hosts EXIT
administrator
answers --source fd99::1

# A program with libibumad at the other host, which asks the administrator.
umad() {
    nsenter --net=/run/netns/peer env RISER_SA=fd99::200:0:0:2 RISER_LINK_LAYER=infiniband \
        "$RISER_BIN/riser" run --addr fd99::2 -- "$@"
}

# Whether the administrator has these groups: groups MGID …
groups() {
    local group
    umad saquery -g >/tmp/groups
    for group; do grep -q "MGID\.*$group\$" /tmp/groups || return 1; done
}

# Whether it has this one only.
only() {
    groups "$1" && [ "$(grep -c MGID /tmp/groups)" = 1 ]
}

# IPoIB joins no broadcast group but that of the subnet's manager, which the other host makes here. With it
# come the groups of all hosts, and that of neighbours who look for fd77::1.
BROADCAST=ff12:401b:ffff::ffff:ffff
modprobe ib_ipoib
wait_for 20 ip link show ib0
ip link set ib0 up
ip address add 10.77.0.1/24 dev ib0
ip -6 address add fd77::1/64 dev ib0 nodad
umad python3 "$RISER_ROOT/tests/vm/sa.py" group $BROADCAST fd99::2
wait_for 60 grep -q 1 /sys/class/net/ib0/carrier
wait_for 30 groups $BROADCAST ff12:401b:ffff::1 ff12:601b:ffff::1 ff12:601b:ffff::1:ff00:1
cat /tmp/groups
# As large as its packets, less IPoIB's header.
ip link show ib0 | grep -q "mtu 2044" || fail "not the group's MTU"

# To a neighbour by his GID: the kernel asks for the path, and sends.
asked=$(asked) packets=$(packets)
ip neighbour add fd77::2 lladdr 80:00:01:23:fd:99:00:00:00:00:00:00:00:00:00:00:00:00:00:02 dev ib0 nud permanent
ping -q -c 2 -W 1 fd77::2 >/dev/null || true
[ "$(asked)" = $((asked + 1)) ] || fail "$(asked) questions, after $asked"
[ "$(packets)" -gt "$packets" ] || fail "nothing was sent"

# rdma-core's rping finds the neighbour's NIC of ours by IPoIB's addresses, and its path by netlink.
pings
asked=$(asked)
timeout 100 rping -c -a fd77::2 -I fd77::1 -C 50 -S 1000 -V
ended $PINGS
[ "$(asked)" = $((asked + 1)) ] || fail "$(asked) questions, after $asked"

# A host behind a gateway has a GID that the kernel asks for, and then for the path.
ip -6 route add fd88::/64 via fd77::2
asked=$(asked)
route /fd77::1 /fd88::5 | grep "dgid fd88::5 sgid fd99::1"
[ "$(asked)" = $((asked + 2)) ] || fail "$(asked) questions, after $asked"
# There is none between addresses of two versions of IP, which the administrator says as well.
ip route add 10.88.0.0/16 via 10.77.0.2
route /10.77.0.1 /10.88.0.5 >/tmp/route 2>&1 && fail "a path"
grep "ROUTE_ERROR status -22" /tmp/route

# The kernel leaves its groups, of which those without another member are gone.
ip link set ib0 down
wait_for 60 only $BROADCAST
