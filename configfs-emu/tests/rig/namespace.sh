# Runs a command with FOLDER/config mounted in place of the kernel's configfs tree, without an effect of `modprobe`,
# and with FOLDER/etc in place of rtslib's state directory: namespace.sh FOLDER COMMAND
set -e
export FOLDER=$1 HOME=$1 PATH=$1/bin:/usr/sbin:/usr/bin:/sbin:/bin
export DBUS_SYSTEM_BUS_ADDRESS=$DBUS_SESSION_BUS_ADDRESS
mount -t tmpfs none /sys/kernel
mkdir /sys/kernel/config
mount --bind "$FOLDER/config" /sys/kernel/config
mkdir -p "$FOLDER/bin"
ln -sf /bin/true "$FOLDER/bin/modprobe"
mount --bind "$FOLDER/etc" /etc/rtslib-fb-target
mount -t tmpfs none /run
eval "$2"
