#: group: pi
#: about: LIO's file of protection information equals that of riserd for the same writes
#: limit: 1200
OVER=iscsi
. /vm/pi.sh
pi_rig
for size in 512 4096; do
    for type in 1 3; do
        lio_disk $type $size
        ours=$(generic RISER "$(pi_lun $type $size)")
        for disk in "$(generic LIO-ORG 0)" "$ours"; do
            $PI write "$disk" 0 64 1
            $PI write "$disk" 100 200 2
            $PI write "$disk" 150 8 3 1
            $PI write "$disk" 180 8 4 3 1
        done
        $PI tuples "$ours" 0 256 >/tmp/ours
        xxd -p -c 8 -l $((256 * 8)) "$IMAGES/lio.img.protection" | sed 's/^\(....\)\(....\)/\1.\2./' >/tmp/lio
        # With type 3, LIO doesn't initialize the reference tags of blocks that it generates.
        if [ $type = 3 ]; then
            sed -i '/\.0000\./s/........$/ffffffff/' /tmp/lio
        fi
        diff /tmp/lio /tmp/ours || fail "type $type, $size bytes: different tuples"
        [ "$(grep -c '\.ffff\.ffffffff$' /tmp/ours)" = 36 ] || fail "the blocks that were not written have other tuples"
        [ "$(grep -c '\.1234\.' /tmp/ours)" = 16 ] || fail "the received tuples are not stored"
        remove_lio_disk
    done
done
