#: group: lio
#: about: LIO restores published configurations, and riserd-configfs imports them as saved by LIO
#: limit: 900
#: packets: none
. /vm/targetcli.sh
# LIO only creates one srpt port per device. If there are two ports with the same identifier, it
# keeps the first one and saves them in a different order.
EXPECTED=" srp twins"

corpus_clean() {
    set +e
    on_lio targetctl clear
    rdma link delete rxe0
    ip link delete d0
    losetup -D
    modprobe -r ib_isert iscsi_target_mod
    rm -rf /srv/riser-corpus /dev/riser-corpus $IMAGES/*.img
}

# Unsupported parts and notes are not treated as errors: import FILE
import() {
    local status=0
    "$RISER_BIN/riserd-configfs" import "$1" 2>/tmp/notes || status=$?
    [[ $status =~ ^[034]$ ]] || fail "import of $1 exited with status $status"
}

trap corpus_clean EXIT
modprobe -a loop dummy rdma_rxe target_core_mod target_core_file target_core_iblock ib_isert
ip link add d0 mtu 4200 type dummy
ip link set d0 up
for n in 10 11 61 62 64 65 66 68 69 70 71; do ip addr add 192.0.2.$n/24 dev d0; done
rdma link add rxe0 type rxe netdev d0
wait_for 20 gid_is_there rxe0 192.0.2.68
mkdir -p /srv/riser-corpus /dev/riser-corpus /etc/rtslib-fb-target/pr
for disk in a b vg0; do
    truncate -s 16M $IMAGES/$disk.img
    ln -s "$(losetup -f --show $IMAGES/$disk.img)" /dev/riser-corpus/$disk
done
different=
for file in "$RISER_ROOT"/configfs-emu/tests/data/lio/*.json; do
    name=$(basename "$file" .json)
    echo "--- $name"
    # This prints each value that is skipped.
    on_lio targetctl restore "$file"
    on_lio targetctl save "$KEEP/$name.json"
    on_lio targetctl clear
    import "$file" >"$KEEP/$name.yaml"
    import "$KEEP/$name.json" >"$KEEP/$name.lio.yaml"
    python3 "$RISER_ROOT/tests/vm/imports.py" "$KEEP/$name.yaml" "$KEEP/$name.lio.yaml" || different+=" $name"
done
[ "$different" = "$EXPECTED" ] || fail "differing objects:$different, expected:$EXPECTED"
