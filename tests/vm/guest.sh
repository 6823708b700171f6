#!/bin/bash
# The only service of the guest: runs N.sh from the shared directory in order, each in a separate
# session, and writes N.out with its output and N.status with its exit status. Stops if there is a
# file `stop` instead of N.sh.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C
if [ ! -d /run/systemd/system ]; then
    mkdir -p /dev/shm /dev/pts /run /var/tmp /tmp
    ln -sf /proc/self/fd /dev/fd
    mount -t tmpfs -o size=60% shm /dev/shm
    mount -t devpts devpts /dev/pts
    mount -t tmpfs run /run
    ip link set lo up
    modprobe configfs
    mount -t configfs configfs /sys/kernel/config
fi
mkdir -p /etc/target/pr /var/target/pr
for n in $(seq 1 100000); do
    until [ -e "/vm/$n.sh" ] || [ -e /vm/stop ]; do sleep 0.1; done
    [ -e /vm/stop ] && break
    setsid bash "/vm/$n.sh" >"/vm/$n.out" 2>&1 </dev/null
    status=$?
    # If a case has not stopped its capture, we have to do this. tcpdump receives packets with a
    # delay of up to one second.
    pgrep -x tcpdump >/dev/null && sleep 1.2
    pkill -x tcpdump && while pgrep -x tcpdump >/dev/null; do sleep 0.1; done
    mkdir -p /vm/keep
    dmesg --read-clear >/vm/keep/dmesg.log
    echo $status >"/vm/$n.status.new"
    mv "/vm/$n.status.new" "/vm/$n.status"
done
[ ! -d /run/systemd/system ] || exec systemctl --no-block poweroff
sync
echo o >/proc/sysrq-trigger
sleep 60
