#: group: sa
#: about: the kernel's IPoIB: riser-sa groups with MADs, paths and GIDs of addresses behind a gateway with netlink
#: limit: 300
#: packets: 16
. "$RISER_ROOT/tests/vm/sa.sh"
ib_hosts
trap no_ib_hosts EXIT
administrator
start_sa --source fd99::1

# Runs a program that uses libibumad on the other host to query the administrator.
umad() {
    nsenter --net=/run/netns/peer env RISER_SA=fd99::200:0:0:2 RISER_LINK_LAYER=infiniband \
        "$RISER_BIN/riser" run --addr fd99::2 -- "$@"
}

# Returns whether the administrator has these groups: groups MGID …
groups() {
    local group
    umad saquery -g >/tmp/groups
    for group; do grep -q "MGID\.*$group\$" /tmp/groups || return 1; done
}

# Returns whether the administrator has this group only.
only() {
    groups "$1" && [ "$(grep -c MGID /tmp/groups)" = 1 ]
}

# IPoIB only joins a broadcast group that was created by the subnet manager, so the other host
# creates one here. After this, the all-hosts group and the solicited-node group for fd77::1 are
# joined.
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
# MTU of the packets without the IPoIB header.
ip link show ib0 | grep -q "mtu 2044" || fail "the MTU differs from the group's MTU"

# If the GID of the neighbour is known, the kernel requests the path and then sends packets.
before=$(kernel_queries) packets=$(packets)
ip neighbour add fd77::2 lladdr 80:00:01:23:fd:99:00:00:00:00:00:00:00:00:00:00:00:00:00:02 dev ib0 nud permanent
ping -q -c 2 -W 1 fd77::2 >/dev/null || true
[ "$(kernel_queries)" = $((before + 1)) ] || fail "$(kernel_queries) kernel queries, previously $before"
[ "$(packets)" -gt "$packets" ] || fail "no packet was sent"

# rdma-core's rping finds our NIC on the neighbour using IPoIB addresses, and its path using
# netlink.
pings
before=$(kernel_queries)
timeout 100 rping -c -a fd77::2 -I fd77::1 -C 50 -S 1000 -V
ended $PINGS
[ "$(kernel_queries)" = $((before + 1)) ] || fail "$(kernel_queries) kernel queries, previously $before"

# For a host behind a gateway, the kernel requests the GID and then the path.
ip -6 route add fd88::/64 via fd77::2
before=$(kernel_queries)
route /fd77::1 /fd88::5 | grep "dgid fd88::5 sgid fd99::1"
[ "$(kernel_queries)" = $((before + 2)) ] || fail "$(kernel_queries) kernel queries, previously $before"
# There is no path between addresses of different IP versions, which must also be reported by the
# administrator.
ip route add 10.88.0.0/16 via 10.77.0.2
route /10.77.0.1 /10.88.0.5 >/tmp/route 2>&1 && fail "a path was found"
grep "ROUTE_ERROR status -22" /tmp/route

# The kernel leaves its groups, and groups without any other member are removed.
ip link set ib0 down
wait_for 60 only $BROADCAST
