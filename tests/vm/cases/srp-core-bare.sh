#: group: srp
#: about: a host without libibverbs: riserd says so, and serves on the software NIC
#: limit: 120
#: short: yes
two_hosts
trap bare_clean EXIT
bare_clean() {
    umount /usr/lib/*/libibverbs.so.1* /usr/lib/*/librdmacm.so.1* 2>/dev/null || true
    srp_clean
}
for lib in /usr/lib/*/libibverbs.so.1 /usr/lib/*/librdmacm.so.1; do
    mount --bind /dev/null "$(realpath "$lib")"
done
"$RISER_BIN/riserd" devices | tee /dev/stderr | grep -q 'rdma_core: no devices, because' || fail "no reason"
serve_disks 64 1
load_srp
srp_login ch_count=1
dd if="$DISK" of=/dev/null bs=64k count=4 iflag=direct status=none
srp_logout
stop_serving
sed -i '$a transport: { provider: rdma_core }' /tmp/riserd.yaml
on_peer "$RISER_BIN/riserd" run --config /tmp/riserd.yaml 2>&1 | tee /dev/stderr | grep -q 'rdma-core is not installed' || fail "no reason"
