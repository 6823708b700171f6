#: group: iwarp
#: about: ib_iser over siw logs in, verifies and logs out
#: limit: 400
TRANSPORT=iser
. /vm/iscsi.sh
iwarp_hosts
trap iscsi_clean EXIT
serve <<END
backends:
  disk0: { kind: file, path: $IMAGES/disk0.img, size: 64MiB, create: true, serial: RIG-0 }
targets:
  - name: rig
    iqn: $IQN
    portals: [{ protocol: iser, listen: 10.99.0.2 }]
    luns: { 0: disk0 }
    access: open
transport: { provider: iwarp }
END
start_iscsid
# There is no TCP portal on this address that could be used for discovery.
iscsi_node
iscsi_login
[ "$(blockdev --getsize64 "$DISK")" = $((64 << 20)) ] || fail "unexpected size"
verify "$DISK" 16m --bs=4k
verify "$DISK" 32m --bs=256k --iodepth=8
iscsi_logout
wait_for 10 no_connections
stop_serving
