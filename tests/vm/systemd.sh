#!/bin/bash
# First program of a guest that boots with systemd: installs files that were created during an
# earlier boot in /vm/installed, and guest.sh as a service. Services of the host are disabled.
rm -rf /etc/systemd/system /etc/rc?.d /etc/init.d
mkdir -p /etc/systemd/system/multi-user.target.wants
cat >/etc/systemd/system/rig.service <<END
[Unit]
Description=Scripts of the rig
After=basic.target

[Service]
ExecStart=/bin/bash /vm/guest.sh
END
ln -s ../rig.service /etc/systemd/system/multi-user.target.wants/rig.service
# Same as on a Debian host.
ln -s /lib/systemd/system/remote-fs.target /etc/systemd/system/multi-user.target.wants/remote-fs.target
[ ! -d /vm/installed ] || cp -RP /vm/installed/. /
# systemd-tmpfiles would remove all files in the host's directory one by one.
mount -t tmpfs tmp /tmp
unset RIG_INIT
exec /lib/systemd/systemd
