#!/usr/bin/env bash
# Builds a kernel module and installs it: module.sh DIRECTORY SOURCES KERNEL_ROOT NAME VARIABLE KERNEL_VERSION. DIRECTORY contains
# the unpacked headers of the kernel, SOURCES is the directory of the module, and VARIABLE enables it in its makefile.
set -euo pipefail
directory=$1 sources=$2 root=$3 name=$4 variable=$5 version=$6
headers=$directory/usr/src/linux-headers-$version
# The headers include a second package using its installed path.
sed -i "s|/usr/src/|$directory/usr/src/|g" "$headers/Makefile"
# BTF debug information would require another program. We only build this module, because the directory may contain others.
make -C "$headers" "M=$sources" "$variable=m" CONFIG_DEBUG_INFO_BTF_MODULES= "$name.ko"
strip --strip-debug "$sources/$name.ko"
updates=$root/lib/modules/$version/updates
mkdir -p "$updates"
# Rename the module when it's complete, so that an interrupted run doesn't leave a partial file.
cp "$sources/$name.ko" "$updates/$name.new"
mv "$updates/$name.new" "$updates/$name.ko"
depmod -b "$root" "$version"
