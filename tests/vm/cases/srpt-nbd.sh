#: group: srpt
#: about: NBD attachments of ib_srpt disks: write, read and compare an image; verified I/O
#: limit: 420
#: short: yes
two_hosts
trap 'riser_on roce detach 0 --force || true; kernel_target_clean' EXIT
kernel_target
mkdir -p /tmp/tree
cp -r /usr/share/doc/bash /usr/share/zoneinfo /tmp/tree/ 2>/dev/null || cp -r /etc /tmp/tree
mke2fs -q -t ext4 -d /tmp/tree "$IMAGES/image" 48M
for provider in roce rdma_core; do
    for lun in 0 1; do
        riser_on $provider attach "$(lun $lun)&channels=2" --nbd /tmp/nbd.sock
        uri="nbd+unix:///lun$lun?socket=/tmp/nbd.sock"
        nbdcopy --flush "$IMAGES/image" "$uri"
        nbdcopy "$uri" "$IMAGES/out"
        cmp -n $((48 << 20)) "$IMAGES/image" "$IMAGES/out"
        truncate -s 48M "$IMAGES/out"
        e2fsck -fn "$IMAGES/out"
        fio --name=nbd --ioengine=nbd --uri="$uri" --rw=randwrite \
            --bsrange=512-64k --blockalign=512 --size=4M --iodepth=8 --verify=crc32c --verify_fatal=1 --verify_state_save=0
        riser_on $provider detach /tmp/nbd.sock
    done
done
rm -f "$IMAGES/image" "$IMAGES/out"
