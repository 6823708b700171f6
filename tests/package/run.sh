#!/usr/bin/env bash
# Tests the Debian package in a new Debian root: run.sh DIRECTORY OLD.deb NEW.deb
#
# The root is for the same release and from the same archive as this machine. systemd runs there as
# init in a container with its own network, and install.sh as a service.
set -euo pipefail
here=$(dirname "$(realpath "$0")")
old=$(realpath "$2") new=$(realpath "$3")
cd "$1"

# Debian packages required by ours, so that it can be installed without network access. Also includes
# the programs that we run with our libraries, and ibacm, which is replaced by riser-sa.
include=systemd,systemd-sysv,dbus,fuse3,procps,ibverbs-utils,perftest,ibacm

# We keep the bare root because it takes a long time to create. Every test uses a new copy of it.
if [ ! -f debian.tar ] || [ "$(cat debian.packages)" != "$include" ]; then
    echo "making a Debian root"
    # Only pass the options required to reach the archive, but no options that need programs missing
    # from the root.
    mapfile -t options < <(apt-config dump | grep -E '^Acquire::(Check-|https?::Proxy)' | sed 's/^/--aptopt=/')
    mapfile -t sources < <(find /etc/apt/sources.list /etc/apt/sources.list.d -type f -size +0 \
        \( -name '*.list' -o -name '*.sources' \) 2>/dev/null | sort)
    codename=$(. /etc/os-release && echo "$VERSION_CODENAME")
    # Use a temporary name until the root is complete, so that we never use the result of an
    # interrupted run.
    mmdebstrap --quiet --variant=minbase --format=tar "--include=$include" "${options[@]}" \
        "$codename" debian.half "${sources[@]}"
    mv debian.half debian.tar
    echo "$include" >debian.packages
fi

rm -rf root
mkdir -p root/test
tar -xpf debian.tar -C root
cp "$old" root/test/old.deb
cp "$new" root/test/new.deb
cp "$here/install.sh" root/test
# When the script is done, the container's init exits with the same status.
cat >root/etc/systemd/system/test.service <<'UNIT'
[Unit]
After=multi-user.target
SuccessAction=exit
FailureAction=exit
[Service]
Type=oneshot
ExecStart=/bin/bash /test/install.sh
StandardOutput=file:/test/log
StandardError=file:/test/log
UNIT
mkdir -p root/etc/systemd/system/multi-user.target.wants
ln -s /etc/systemd/system/test.service root/etc/systemd/system/multi-user.target.wants

status=0
systemd-nspawn --quiet --boot --register=no --keep-unit --private-network --bind=/dev/fuse \
    --directory "$PWD/root" </dev/null >/dev/null 2>&1 || status=$?
cat root/test/log
# Check the last line in addition to the status, because the container may exit with success before
# the script has started.
if [ "$status" != 0 ] || [ "$(tail -n 1 root/test/log)" != "--- passed" ]; then
    echo "the installation test failed with status $status" >&2
    exit 1
fi
rm -rf root
