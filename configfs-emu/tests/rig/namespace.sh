# Runs a command with DIRECTORY/config mounted over the kernel's configfs tree, DIRECTORY/etc mounted over rtslib's
# state directory, and a `modprobe` without any effect: namespace.sh DIRECTORY COMMAND
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
