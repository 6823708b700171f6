#!/bin/busybox sh
# First program of the guest's initramfs: creates a RAM overlay for the host's file system, which is
# mounted read-only, mounts the shared directory for scripts and results, and switches to this root.
export PATH=/bin
/bin/busybox mkdir -p /proc /sys /dev /host /rw /new
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sysfs /sys
/bin/busybox mount -t devtmpfs dev /dev
for module in $(/bin/busybox cat /modules/order); do
    /bin/busybox insmod "/modules/$module"
done
/bin/busybox mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=1048576,cache=loose hostroot /host
/bin/busybox mount -t tmpfs -o size=80% rw /rw
/bin/busybox mkdir -p /rw/up /rw/work
/bin/busybox mount -t overlay -o lowerdir=/host,upperdir=/rw/up,workdir=/rw/work overlay /new
# The guest must not use the state of a daemon on the host.
/bin/busybox rm -rf /new/var/lib/riserd || echo "the guest can access the host's /var/lib/riserd"
/bin/busybox mkdir -p /new/vm
/bin/busybox mount -t 9p -o trans=virtio,version=9p2000.L,msize=1048576,cache=none share /new/vm
version=$(/bin/busybox uname -r)
/bin/busybox rm -rf "/new/lib/modules/$version"
/bin/busybox mkdir -p /new/lib/modules
/bin/busybox ln -s "$(/bin/busybox cat /new/vm/modules)" "/new/lib/modules/$version"
for dir in proc sys dev; do
    /bin/busybox mount --move /$dir /new/$dir
done
exec /bin/busybox switch_root /new /bin/bash "/vm/$RIG_INIT"
