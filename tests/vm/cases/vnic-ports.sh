#: group: vnic
#: about: two virtual Ethernets with the same members: separate interfaces, MTUs and switches
#: limit: 120
#: here: yes
#: packets: none
hosts 1500 a b c
member a 10.98.0.1 --name vnic0 --name far0 --manage --switch 7 --switch 9 --mtu 1500 --mtu 9000
member b 10.98.0.2 --name vnic0 --name far0
# A member with a single interface uses the first switch.
member c 10.98.0.3
n=0
for host in a b c; do
    n=$((n + 1))
    joined $host $n
done
for host in a b; do
    wait_for 15 on $host grep -q 1 /sys/class/net/far0/carrier
done
on a ip address add 192.168.60.1/24 dev far0
on b ip address add 192.168.60.2/24 dev far0
[ "$(on b cat /sys/class/net/vnic0/mtu) $(on b cat /sys/class/net/far0/mtu)" = '1500 9000' ] || fail "unexpected MTUs"
soon a 2
soon a 3
soon b 3
wait_for 15 on a ping -q -c 1 -W 1 192.168.60.2
reaches a 192.168.60.2 -M do -s 8972

# The two Ethernets must be separate.
on c ip address add 192.168.60.3/24 dev vnic0
refused on a ping -q -c 1 -W 1 192.168.60.3

# An interface with a full queue must not block others. Its frames are sent to another host, which
# may drop them.
on c iperf3 -s -1 -D
wait_for 10 on c sh -c 'ss -Hltn sport = :5201 | grep -q .'
on a iperf3 -u -b 0 -l 1400 -t 20 -c 192.168.50.3 >"$KEEP/flood" &
flood=$!
sleep 2
on a ping -q -c 10 -i 0.3 -W 2 192.168.60.2 | tee "$KEEP/during" || true
kill -0 $flood || fail "the flood has already completed"
python3 - "$KEEP/during" <<'END'
import re, sys
received = int(re.search(r"(\d+) received", open(sys.argv[1]).read())[1])
assert received >= 5, f"{received} of 10 pings received during a flood"
END
wait $flood || true

# Both interfaces are removed at the same time, and statistics are printed for both.
leave b
for name in vnic0 far0; do
    grep -q "^$name: [1-9][0-9]* frames sent, [1-9][0-9]* received" "$KEEP/b.out" || fail "no statistics of $name"
    on b ip link show $name 2>/dev/null && fail "$name was not removed"
done
reaches c 192.168.50.1

# If there are more interfaces than switches, the additional interface has no carrier, and its
# member reports this.
member b 10.98.0.2 --name vnic0 --name far0 --name third0
wait_for 15 grep -q 'some interfaces are not configured by a manager' "$KEEP/b.log"
on b grep -q 1 /sys/class/net/vnic0/carrier || fail "the first interface has no carrier"
on b grep -q 1 /sys/class/net/third0/carrier 2>/dev/null && fail "the third interface has a carrier"
leave b
leave c
leave a
