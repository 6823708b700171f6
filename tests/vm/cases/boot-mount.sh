#: group: boot
#: about: the book: file systems mounted at boot with ublk and FUSE, including a boot without the target
#: limit: 400
#: boots: 3
#: packets: none
unset RISER_STATE_DIR
INSTALLED=/vm/installed
IQN=iqn.2026-01.com.example:disk1
SECRET=a-secret-of-this-host
boot_end() {
    journalctl -b --no-pager -o short-monotonic >"$KEEP/journal.log"
    systemctl list-jobs --no-pager || true
}
trap boot_end EXIT

# The target host, 192.0.2.30, is a namespace. Its two disks are partitions of the guest's disk,
# which persists across boots.
install_target() {
    local units=$INSTALLED/etc/systemd/system
    mkdir -p "$units/multi-user.target.wants" "$INSTALLED/usr/bin"
    ln -s "$RISER_BIN/riser" "$INSTALLED/usr/bin/riser"
    cat >"$INSTALLED/etc/network.sh" <<END
modprobe -a veth virtio_blk ext4
ip netns add peer
ip link add v0 type veth peer name v1 netns peer
ip link set v0 up
ip addr add 192.0.2.20/24 dev v0
ip -n peer addr add 192.0.2.30/24 dev v1
END
    cat >"$units/rig-network.service" <<END
[Unit]
Before=network-online.target
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/bash -e /etc/network.sh
END
    cat >"$units/rig-target.service" <<END
[Unit]
Requires=rig-network.service
After=rig-network.service
Before=network-online.target
[Service]
Type=notify
ExecStartPre=ip -n peer link set v1 up
ExecStart=ip netns exec peer $RISER_BIN/riserd run --config /etc/target.yaml
END
    cat >"$INSTALLED/etc/target.yaml" <<END
backends:
  disk1: { kind: device, path: /dev/vda1, serial: RIG-1 }
  disk2: { kind: device, path: /dev/vda2, serial: RIG-2 }
targets:
  - name: rig
    iqn: $IQN
    portals: [{ protocol: iscsi, listen: 192.0.2.30 }]
    luns: { 0: disk1, 1: disk2 }
    access: open
    chap: { users: [{ name: me, secret: $SECRET }] }
END
    ln -s ../rig-network.service "$units/multi-user.target.wants"
}

# Creates two partitions of 100 MiB in an MBR.
partition_disk() {
    local i
    for i in 1 2; do
        # Status, CHS, type, CHS; first sector and number of sectors.
        python3 -c 'import struct, sys; i = int(sys.argv[1]); sys.stdout.buffer.write(
            struct.pack("<8sII", bytes(4) + bytes([0x83]) + bytes(3), 2048 + (i - 1) * 204800, 204800))' $i |
            dd of=/dev/vda bs=1 seek=$((446 + 16 * (i - 1))) status=none
    done
    printf '\125\252' | dd of=/dev/vda bs=1 seek=510 status=none
    blockdev --rereadpt /dev/vda
    wait_for 60 test -b /dev/vda2
}

# Installs the files from the book: disk1 without changes, and disk2 as LUN 1 with FUSE.
install_book() {
    local attachments=$INSTALLED/etc/riser/attachments fstab file
    mkdir -p "$attachments" "$INSTALLED/usr/lib/systemd/system" "$INSTALLED/mnt/disk2"
    cp "$RISER_ROOT/deploy/systemd/attachments/riser@.service" "$INSTALLED/usr/lib/systemd/system"
    file=$(book attach "At every boot" ini | sed "s/PASSWORD=.*/PASSWORD=$SECRET/")
    echo "$file" >"$attachments/disk1"
    sed 's|/0$|/1|; s|^EXPORT=.*|EXPORT=--fuse /mnt/disk2|' <<<"$file" >"$attachments/disk2"
    fstab=$(book attach "At every boot" fstab)
    grep ^/dev/ublkb1 <<<"$fstab" >"$INSTALLED/etc/fstab"
    grep ^/mnt/disk1/lun0 <<<"$fstab" | sed 's/disk1/disk2/g; s/lun0/lun1/' >>"$INSTALLED/etc/fstab"
    cat "$attachments"/* "$INSTALLED/etc/fstab"
}

# Returns whether both file systems are mounted and contain the files of all boots so far.
is_mounted() {
    local disk
    for disk in 1 2; do
        mountpoint -q /srv/disk$disk && (cd /srv/disk$disk && sha256sum --quiet -c "$INSTALLED/sums") || return 1
    done
}

# Writes a file for this boot to both disks.
write_file() {
    head -c 3M /dev/urandom >/srv/disk1/boot$BOOT
    cp /srv/disk1/boot$BOOT /srv/disk2
    (cd /srv/disk1 && sha256sum "boot$BOOT") >>"$INSTALLED/sums"
}

# Waits until the system has booted, with or without the target.
booted() {
    wait_for 120 systemctl is-active multi-user.target
    systemctl --failed --no-pager
}

echo "--- boot $BOOT"
booted
case $BOOT in
1)
    wait_for 60 test -b /dev/vda
    partition_disk
    install_target
    install_book
    cp -RP $INSTALLED/. /
    # There is no file system on a new disk yet.
    : >/etc/fstab
    systemctl daemon-reload
    systemctl start rig-network rig-target
    systemctl enable --now riser@disk1 riser@disk2
    cp -P /etc/systemd/system/multi-user.target.wants/riser@* $INSTALLED/etc/systemd/system/multi-user.target.wants
    riser list
    mkfs.ext4 -q /dev/ublkb1
    mkfs.ext4 -q -F /mnt/disk2/lun1
    cp $INSTALLED/etc/fstab /etc/fstab
    systemctl daemon-reload
    systemctl start srv-disk1.mount srv-disk2.mount
    write_file
    is_mounted || fail "the files of previous boots are missing"
    # Start the target at the next boot.
    ln -s ../rig-target.service $INSTALLED/etc/systemd/system/multi-user.target.wants
    ;;
2)
    wait_for 120 is_mounted
    write_file
    rm $INSTALLED/etc/systemd/system/multi-user.target.wants/rig-target.service
    ;;
3)
    ! mountpoint -q /srv/disk1 || fail "a file system is mounted without its target"
    systemctl start rig-target
    wait_for 120 is_mounted
    write_file
    ;;
esac
riser list
