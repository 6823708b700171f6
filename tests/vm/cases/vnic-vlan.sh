#: group: vnic
#: about: VLANs of a stock kernel over the virtual Ethernet: priorities, two VLANs, maximum frame size
#: limit: 300
modprobe -a tun veth bridge 8021q
. "$RISER_ROOT/tests/vm/here.sh"
hosts 1500 a b
capture a
member a 10.98.0.1 --manage
member b 10.98.0.2
joined a 1
joined b 2
soon a 2
for id in 7 4094; do
    n=0
    for host in a b; do
        n=$((n + 1))
        on $host ip link add link vnic0 name vlan$id type vlan id $id egress-qos-map 0:5
        on $host ip address add 192.168.$((id % 100)).$n/24 dev vlan$id
        on $host ip address add fd$((id % 100))::$n/64 dev vlan$id nodad
        on $host ip link set vlan$id up
    done
    wait_for 15 on a ping -q -c 1 -W 1 192.168.$((id % 100)).2
    reaches a 192.168.$((id % 100)).2 -M do -s 1472
    reaches b fd$((id % 100))::1 -M do -s 1452
    on a arping -I vlan$id -c 2 192.168.$((id % 100)).2
done
# The two VLANs must be separate.
on b ip address del 192.168.94.2/24 dev vlan4094
refused on a ping -q -c 1 -W 1 192.168.94.2
captured
# The service class for a priority is a DSCP class selector.
tshark -r "$KEEP/a.pcap" -Y 'ip.dsfield.dscp == 40' 2>/dev/null | grep -q RRoCE ||
    fail "no packet has the service class of priority 5"
leave b
leave a
# The next case in this boot will create these again.
ip netns del a
ip netns del b
ip link del switch
umount /run/netns
