#: group: vnic
#: about: virtual Ethernet with MTUs of 1500 to 9000 over path MTUs of 1024 and 4096, IPv4 and IPv6
#: limit: 180
#: here: yes
#: packets: none
hosts 1500 a b
round() { # MTU of the virtual Ethernet, addresses of both
    local mtu=$1
    member a "$2" --manage --mtu "$mtu"
    member b "$3"
    joined a 1
    joined b 2
    soon a 2
    [ "$(on b cat /sys/class/net/vnic0/mtu)" -eq "$mtu" ] || fail "the MTU differs from $mtu"
    # The maximum packet size, one byte more, and sizes around the length of a fragment.
    reaches a 192.168.50.2 -M do -s $((mtu - 28))
    reaches b fd50::1 -M do -s $((mtu - 48))
    refused on a ping -c 1 -W 1 -M do -s $((mtu - 27)) 192.168.50.2
    for size in 0 1 17 18 962 963 $((mtu / 2)) $((mtu - 29)); do
        reaches a 192.168.50.2 -M do -s "$size" -c 1
    done
    # The same sizes for multicast groups.
    on a ping -q -c 2 -i 0.2 -M do -s $((mtu - 48)) -I vnic0 ff02::1
    on b iperf3 -s -1 -D
    sleep 0.5
    on a iperf3 -c 192.168.50.2 -t 2 -J >"$KEEP/tcp-${4//[ ,]/-}.json"
    python3 -c 'import json, sys
rate = json.load(open(sys.argv[1]))["end"]["sum_received"]["bits_per_second"] / 1e6
print(f"result: {sys.argv[2]}: TCP {rate:.0f} Mbit/s")
assert rate > 10, rate' "$KEEP/tcp-${4//[ ,]/-}.json" "$4"
    leave b
    leave a
}
for mtu in 1500 9000; do
    round $mtu 10.98.0.1 10.98.0.2 "MTU $mtu over 1024"
done
for host in a b; do
    ip link set to-$host mtu 9000
    on $host ip link set eth0 mtu 9000
done
ip link set switch mtu 9000
round 4000 10.98.0.1 10.98.0.2 "MTU 4000 over 4096"
round 9000 fd98::1 fd98::2 "MTU 9000 over 4096, IPv6"

# If a member uses smaller packets, other members must detect this.
on b ip link set eth0 mtu 1500
ip link set to-b mtu 1500
round 9000 10.98.0.1 10.98.0.2 "MTU 9000 over 4096 and 1024"
