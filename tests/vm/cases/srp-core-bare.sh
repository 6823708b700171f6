#: group: srp
#: about: without libibverbs, riserd and riser report an error and can use the software NIC
#: limit: 120
#: short: yes
#: packets: none
LIBS=$(dirname "$(realpath /usr/lib/*/libibverbs.so.1)")
bare_clean() {
    mv /tmp/rdma-core/* "$LIBS"
    srp_clean
}
two_hosts
end_capture # tcpdump also requires libibverbs
mkdir -p /tmp/rdma-core
trap bare_clean EXIT
mv "$LIBS"/libibverbs.so* "$LIBS"/librdmacm.so* /tmp/rdma-core
# Checks that the output of a command contains these words: says WORDS COMMAND …
says() {
    local words=$1 text
    shift
    text=$("$@" 2>&1) || true
    echo "$text"
    # Ignore line breaks.
    [[ $(echo "$text" | tr -s ' \n│' ' ') == *"$words"* ]] || fail "the output of $* does not contain '$words'"
}
for program in riserd riser; do
    says 'rdma_core: no devices: rdma-core is not installed: libibverbs.so.1' "$RISER_BIN/$program" devices
    says '"unavailable"' "$RISER_BIN/$program" devices -o json
done
serve_disks 64 1
load_srp
srp_login ch_count=1
dd if="$DISK" of=/dev/null bs=64k count=4 iflag=direct status=none
srp_logout
stop_serving
sed -i '$a transport: { provider: rdma_core }' /tmp/riserd.yaml
says 'rdma-core is not installed' on_peer timeout 5 "$RISER_BIN/riserd" run --config /tmp/riserd.yaml
sed -i '$a strict: true' /tmp/riserd.yaml
says 'rdma-core is not installed' on_peer "$RISER_BIN/riserd" run --config /tmp/riserd.yaml
says 'rdma-core is not installed' riser_on rdma_core discover srp://10.99.0.2
says 'rdma-core is not installed' "$RISER_BIN/riser" rping client 10.99.0.2 --addr 10.99.0.1 --provider rdma_core
