#!/bin/busybox sh
export PATH=/bin
/bin/busybox mkdir -p /proc /dev
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t devtmpfs dev /dev
for module in $(/bin/busybox cat /modules/order); do /bin/busybox insmod "/modules/$module"; done
/bin/busybox echo "DISK $(/bin/busybox sha256sum </dev/vda)"
blocks=$(/bin/busybox blockdev --getsz /dev/vda)
/bin/busybox echo "MARK" | /bin/busybox dd of=/dev/vda bs=512 seek=$((blocks - 1)) conv=sync,fsync
/bin/busybox poweroff -f
