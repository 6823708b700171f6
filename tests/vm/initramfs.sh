#!/usr/bin/env bash
# Creates DIRECTORY/initramfs.cpio, which contains busybox, the first program of the guest (INIT), and modules with their
# dependencies in /modules: initramfs.sh DIRECTORY INIT KERNEL_ROOT KERNEL_VERSION MODULE...
set -euo pipefail
directory=$1 init=$2 root=$3 version=$4
shift 4
tree=$directory/initramfs
rm -rf "$tree"
mkdir -p "$tree/bin" "$tree/modules"
# We use the static busybox from Debian, because the archive doesn't contain libraries.
cp /bin/busybox "$tree/bin"
install -m 755 "$init" "$tree/init"
# A module can be a dependency of several modules. We keep its first entry, which is after its own dependencies and before
# all modules that need it. /modules/order has the order to load them.
for module; do
    modprobe -d "$root" -S "$version" --show-depends "$module"
done | awk '$1 == "insmod" && !seen[$2]++ { print $2 }' | while read -r path; do
    name=$(basename "$path" .xz)
    case $path in
    *.xz) xz -dc "$path" >"$tree/modules/$name" ;;
    *) cp "$path" "$tree/modules" ;;
    esac
    echo "$name"
done >"$tree/modules/order"
(cd "$tree" && find . | cpio -o -H newc --quiet) >"$directory/initramfs.cpio"
