#: group: ipsec
#: about: the book: IPsec with strongSwan, as documented, for all protocols, without visible data
#: limit: 360
#: packets: 1000
IQN=iqn.2026-01.com.example:rig
SRP=srp://10.99.0.2/0 ISER=iser://10.99.0.2/$IQN/0 ISCSI=iscsi://10.99.0.2/$IQN/0
# Data to write, which must not be visible on the wire: 64 KiB.
MARK="a mark that no one else may read"
printf "%.0s$MARK" {1..2048} >/tmp/marks
WRITTEN=0

# Two hosts in separate namespaces, and a switch where each packet is captured once, as seen on the
# wire.
ipsec_hosts() {
    local name link address
    modprobe veth
    switch 1500
    PEER=(ip netns exec peer)
    # The rules in the book are for IPv4. Without IPv6, only ARP and IGMP may be sent in plain text.
    ip netns exec switch sysctl -qw net.ipv6.conf.all.disable_ipv6=1
    while read -r name link address; do
        ip netns add "$name"
        ip netns exec "$name" sysctl -qw net.ipv6.conf.all.disable_ipv6=1
        ip link set "$link" netns "$name"
        # Same as in `two_hosts`: capture each UDP segment separately.
        ip -n "$name" link set "$link" mtu 1500 gso_max_segs 1
        ip -n "$name" addr add "$address/24" dev "$link"
        ip -n "$name" link set lo up
        ip -n "$name" link set "$link" up
    done <<<"peer v1 10.99.0.2
host v0 10.99.0.1"
}

ipsec_clean() {
    set +e
    [ -z "$TAP" ] || { kill $TAP; wait $TAP; }
    kill -KILL ${RISERD:-} ${CHARON[*]:-}
    cp /tmp/taps/*.pcap "$KEEP"
    ip netns delete host
    rm -rf /etc/netns /var/lib/riserd /tmp/keys /tmp/taps
    one_host
}

# Captures all packets on the switch: tap NAME. The file is in memory, because it is read multiple
# times.
TAP=
tap() {
    TAPPED=$1
    ip netns exec switch tcpdump -B 65536 -i p0 -s 0 -w "/tmp/taps/$1.pcap" 2>"/tmp/taps/$1" &
    TAP=$!
    wait_for 60 grep -q listening "/tmp/taps/$1"
}

end_tap() {
    # tcpdump receives packets with a delay of up to one second.
    sleep 1.2
    kill $TAP
    wait $TAP || true
    TAP=
    grep -q '^0 packets dropped by kernel' "/tmp/taps/$TAPPED" || fail "$(cat "/tmp/taps/$TAPPED")"
}

# Prints the number of packets in a capture that match a filter, or nothing if tcpdump fails: tapped
# NAME WORD …
tapped() {
    tcpdump -nr "/tmp/taps/$1.pcap" "${@:2}" >/tmp/taps/found 2>/dev/null && wc -l </tmp/taps/found
}

# Fails if a capture contains packets other than ESP, IKE, ARP and multicast group reports.
only_esp() {
    local plain="not esp and not arp and not igmp and not (udp and (port 500 or port 4500))"
    [ "$(tapped "$1" "$plain")" = 0 ] || fail "$1: plain-text packets: $(tcpdump -c 10 -nr "/tmp/taps/$1.pcap" "$plain")"
    ! grep -aq "$MARK" "/tmp/taps/$1.pcap" || fail "$1: the data are visible"
}

# Runs riser on the host.
on_host() {
    RISER_PROVIDER=roce nsenter --net=/run/netns/host "$RISER_BIN/riser" "$@"
}

# Writes the marks and reads them again using one protocol. Each time, the first mark is replaced by
# a number.
marks() {
    printf '%-32s' $((++WRITTEN)) | dd of=/tmp/marks conv=notrunc status=none
    on_host write --overwrite "$1" /tmp/marks
    on_host read "$1" --length 65536 | cmp - /tmp/marks
}

# Verified reads and writes using one protocol.
verified() {
    on_host bench --overwrite "$1" --rw randrw --mix 40 --bs 16k --depth 16 --size 4m --warm-up 0 --verify \
        --timeout 60s "${@:2}"
}

# Fails if any protocol can reach the target.
no_way_in() {
    local pids=() pid
    for url in $SRP $ISER $ISCSI; do
        on_host --timeout 3s read "$url" --length 512 >/dev/null 2>&1 &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do
        ! wait "$pid" || fail "a protocol reaches the target"
    done
}

# Creates a separate /etc for one side, with a log and a separate socket, because both sides run in
# the same guest.
strongswan_etc() {
    mkdir -p "/etc/netns/$1"
    cp -r /etc/swanctl "/etc/netns/$1"
    {
        cat /etc/strongswan.conf
        printf '%s\n' 'charon-systemd {' \
            'filelog {' 'rig {' "path = $KEEP/charon-$1.log" 'flush_line = yes' '}' '}' \
            'plugins {' 'vici {' "socket = unix:///run/$1.vici" '}' '}' '}' \
            'swanctl {' "socket = unix:///run/$1.vici" '}'
    } >"/etc/netns/$1/strongswan.conf"
}

# Installs the configuration and keys as described in the book: has NAME CONFIGURATION CERTIFICATE
has() {
    local etc=/etc/netns/$1/swanctl
    rm -f "$etc"/{x509,private}/*
    cp "$2" "$etc/conf.d/storage.conf"
    cp /tmp/keys/ca.pem "$etc/x509ca"
    cp "/tmp/keys/$3.pem" "$etc/x509"
    cp "/tmp/keys/$3.key" "$etc/private"
}

# Starts the program of strongswan.service on one side.
declare -A CHARON
strongswan() {
    ip netns exec "$1" charon-systemd >"$KEEP/charon-$1.out" 2>&1 &
    CHARON[$1]=$!
    wait_for 60 swan "$1" --stats
    swan "$1" --load-all --noprompt
}

# Runs swanctl on one side, without messages about missing plugins.
swan() {
    ip netns exec "$1" swanctl "${@:2}" 2> >(grep -v "failed to load" >&2)
}

# Prints the SPIs of all ESP security associations on the host.
spis() {
    swan host --list-sas | awk '$1 == "in" || $1 == "out" { print $2 }'
}

# Returns whether there are new SPIs. Old SPIs may remain for a few seconds.
has_others_than() {
    [ -n "$(spis | grep -vF "$1")" ]
}

trap ipsec_clean EXIT
mkdir -p /tmp/keys /tmp/taps
book security "A tunnel" sh >/tmp/keys.sh
book security "A tunnel" ini | sed -n '/^connections {/,/^}/p' >/tmp/target.conf
sed 's/10\.99\.0\.2/HOST/; s/10\.99\.0\.1/10.99.0.2/; s/HOST/10.99.0.1/
    s/target\.pem/host.pem/; s/CN=host/CN=target/' /tmp/target.conf >/tmp/host.conf
sed 's/host\.pem/other.pem/' /tmp/host.conf >/tmp/other.conf
cat /tmp/keys.sh /tmp/target.conf /tmp/host.conf
# Creates a certificate from the same CA for another name.
(
    cd /tmp/keys
    . /tmp/keys.sh
    pki --gen --type ed25519 --outform pem >other.key
    pki --issue --cacert ca.pem --cakey ca.key --type priv --in other.key --dn CN=other --outform pem >other.pem
)

ipsec_hosts
serve <<END
backends:
  disk: { kind: ram, size: 8MiB }
targets:
  - name: rig
    iqn: $IQN
    portals:
      - { protocol: srp, listen: 10.99.0.2 }
      - { protocol: iser, listen: 10.99.0.2 }
      - { protocol: iscsi, listen: 10.99.0.2 }
    luns: { 0: disk }
    access: open
END

# Without a tunnel all data is visible, so it would also be detected if it bypassed a tunnel.
tap without
for url in $SRP $ISER $ISCSI; do marks "$url"; done
end_tap
grep -aq "$MARK" /tmp/taps/without.pcap || fail "the data are not visible without a tunnel"
[ "$(tapped without udp port 4791)" -gt 100 ] || fail "no RDMA packets are visible"
[ "$(tapped without tcp port 3260)" -gt 20 ] || fail "no iSCSI packets are visible"

# If only the target uses strongSwan, it must ignore all plain-text packets.
strongswan_etc peer
has peer /tmp/target.conf target
strongswan peer
tap target
no_way_in
end_tap
[ "$(tapped target src 10.99.0.1 and udp port 4791)" -gt 0 ] || fail "the host did not send RDMA packets"
[ "$(tapped target src 10.99.0.1 and tcp port 3260)" -gt 0 ] || fail "the host did not send iSCSI packets"
[ "$(tapped target src 10.99.0.2 and not arp and not igmp)" = 0 ] || fail "the target responded"

# A certificate from the same CA for another name must be rejected.
strongswan_etc host
has host /tmp/other.conf other
strongswan host
tap other
! swan host --initiate --child storage || fail "a host with another certificate has keys"
no_way_in
end_tap
only_esp other
[ "$(tapped other src 10.99.0.2 and udp port 4500)" -gt 0 ] || fail "the target did not receive the certificate"
[ "$(tapped other esp)" = 0 ] && [ -z "$(spis)" ] || fail "a host with another certificate has keys"

has host /tmp/host.conf host
swan host --load-all --noprompt
tap both
# After a rejection, the kernel would not request new keys for minutes.
swan host --initiate --child storage
for url in $SRP $ISER $ISCSI; do marks "$url"; done
for name in peer host; do
    sas=$(swan $name --list-sas)
    echo "$sas"
    for words in "ESTABLISHED, IKEv2" "INSTALLED, TRANSPORT, ESP:AES_GCM_16-128"; do
        [[ $sas == *"$words"* ]] || fail "$name: no '$words'"
    done
done
# Renew the keys under load, which normally happens every hour.
before=$(spis)
verified $SRP --runtime 10s &
LOAD=$!
sleep 2
swan host --rekey --child storage
wait_for 10 has_others_than "$before"
kill -0 $LOAD || fail "the load has already completed"
wait $LOAD || fail "the load reported an error"
verified $ISER --total 1m
# Negotiate new keys after the other side has deleted all of them.
before=$(spis)
swan peer --terminate --ike storage
verified $ISCSI --total 1m
has_others_than "$before" || fail "the deleted keys are still in use"
end_tap
only_esp both
for address in 10.99.0.1 10.99.0.2; do
    [ "$(tapped both src $address and esp)" -gt 500 ] || fail "too little ESP from $address"
    [ "$(tapped both src $address and udp port 500)" -gt 0 ] || fail "no IKE from $address"
done
stop_serving
RISERD=
