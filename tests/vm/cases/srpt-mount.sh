#: group: srpt
#: about: FUSE attachments of ib_srpt disks: mkfs, mount, copy, fsck
#: limit: 420
modprobe -a fuse loop ext4
two_hosts
mnt=/tmp/mnt
mkdir -p $mnt
trap 'riser_on roce detach 0 --force || true; kernel_target_clean' EXIT
kernel_target
for provider in roce rdma_core; do
    riser_on $provider attach "$(lun 0)&channels=4" --fuse $mnt
    fio --name=fuse --filename=$mnt/lun0 --rw=randwrite --bsrange=4k-256k --size=8M --direct=1 \
        --ioengine=psync --verify=crc32c --verify_fatal=1 --verify_state_save=0
    mkfs.ext4 -q -F $mnt/lun0
    riser_on $provider detach $mnt
    riser_on $provider mount "$(lun 0)&channels=4" $mnt
    riser_on $provider list
    cp -r /usr/share/zoneinfo $mnt/tree 2>/dev/null || cp -r /etc $mnt/tree
    sync -f $mnt
    riser_on $provider detach $mnt
    # Check the file system using the kernel below the target.
    e2fsck -fn "$IMAGES/srpt.img"
    riser_on $provider mount "$(lun 0)" $mnt --read-only
    diff -r --no-dereference /usr/share/zoneinfo $mnt/tree 2>/dev/null || diff -r --no-dereference /etc $mnt/tree
    umount $mnt
    wait_for 30 nothing_attached
done
