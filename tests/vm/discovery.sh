# Functions for discovery of riserd by programs for InfiniBand, on the hosts of tests/vm/sa.sh.

PORT_GID=fd990000000000000000000000000003
FIRST=0200c0ffee000001
SECOND=0200c0ffee000002

# Serves two targets at fd99::3, which is registered with the administrator: discoverable [extra
# configuration line …]
discoverable() {
    on_peer ip addr add fd99::3/64 dev v1 nodad
    {
        echo "backends:"
        for i in 1 2; do
            echo "  disk$i: { kind: file, path: $IMAGES/disk$i.img, size: 64MiB, create: true, serial: RIG-$i }"
        done
        echo "targets:"
        echo "  - { name: first, portals: [{ protocol: srp, listen: 'fd99::3', ioc_guid: 0x$FIRST }],"
        echo "      luns: { 0: disk1 }, access: open }"
        echo "  - { name: second, portals: [{ protocol: srp, listen: '[fd99::3]:5556', ioc_guid: 0x$SECOND }],"
        echo "      luns: { 0: disk2 }, access: open }"
        echo "transport: { administrator: 'fd99::200:0:0:2' }"
    } >/tmp/discoverable.yaml
    serve </tmp/discoverable.yaml
    wait_for 60 grep -q 'registered the port' "$KEEP/riserd.log"
}

# Prints the parameters of a login by the IB CM: login_of GUID
login_of() {
    echo "id_ext=$1,ioc_guid=$1,dgid=$PORT_GID,pkey=ffff,service_id=$1"
}

# Reverts `discoverable` and `ib_hosts`.
not_discoverable() {
    # This must also clean up after a failed case, so no command may exit the script.
    (srp_logout) || true
    modprobe -r ib_srp 2>/dev/null || true
    [ -z "${RISERD:-}" ] || STARTED+=("$RISERD")
    no_ib_hosts
    rm -rf "$IMAGES"/disk*.img /var/lib/riserd
}
