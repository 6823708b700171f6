# Functions for cases with tgt's iSER target on the kernel's RDMA device.
TGT_IQN=iqn.2026-01.com.example:tgt
# Logins are longer than the default of 400 bytes.
CAPTURED="-s 1000 -c 100000 udp port 4791"

# Two hosts, and tgt on 10.99.0.1:3260 with a 24 MiB file as LUN 1, for libiscsi. With iSER,
# initiators need access in both the address list and the name list.
tgt_rig() {
    local name
    two_hosts
    trap tgt_clean EXIT
    ulimit -l unlimited
    truncate -s 24M "$IMAGES/tgt.img"
    tgtd -f --iser pool_sz_mb=128 >>"$KEEP/tgtd.log" 2>&1 &
    TGTD=$!
    wait_for 20 tgt_do target --op show
    tgt_do target --op new --tid 1 -T $TGT_IQN
    tgt_do logicalunit --op new --tid 1 --lun 1 -b "$IMAGES/tgt.img"
    tgt_do logicalunit --op update --tid 1 --lun 1 --params thin_provisioning=1
    tgt_do target --op bind --tid 1 -I ALL
    for name in iqn.2007-10.com.github:sahlberg:libiscsi:iscsi-test{,-2}; do
        tgt_do target --op bind --tid 1 -Q "$name"
    done
}

# Runs tgtadm: tgt_do MODE ARGUMENT …
tgt_do() {
    tgtadm --lld iser --mode "$@"
}

tgt_clean() {
    set +e
    end_capture
    # tgtd does not exit on request.
    kill -KILL "$TGTD"
    wait "$TGTD"
    rm -f "$IMAGES/tgt.img"
    one_host
}
