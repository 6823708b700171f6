#!/bin/bash
# Installs, uses, upgrades, removes and purges the Debian package. Runs as a service in a separate root file
# system with systemd as init; /test contains old.deb and new.deb.
set -euo pipefail

fail() {
    echo "FAILED: $*"
    journalctl --no-pager -n 60 -u 'riser*' || true
    exit 1
}

wait_for() {
    local seconds=$1
    shift
    local end=$((SECONDS + seconds))
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $end ] || fail "timed out after $seconds s: $*"
        sleep 0.1
    done
}

trap 'fail "line $LINENO: $BASH_COMMAND"' ERR

version() { dpkg-query -W -f '${Version}' riser; }
restarts() { systemctl show -P NRestarts riserd; }
main_pid() { systemctl show -P MainPID riserd; }
mode() { stat -c '%a %U:%G' "$1"; }

# Writes a random pattern to the attached disk.
write_pattern() {
    dd if=/dev/urandom of=/tmp/pattern bs=1M count=8 status=none
    dd if=/tmp/pattern of=/mnt/lun0 bs=1M conv=notrunc,fsync status=none
}
# Checks that the attached disk contains the pattern.
check_pattern() {
    cmp -n $((8 << 20)) /tmp/pattern /mnt/lun0 || fail "the disk does not contain the written data"
}

echo "--- installed"
dpkg -i /test/old.deb
OLD=$(version)
systemctl is-active riserd.service riserd.socket
riserd status
id riser
[ "$(mode /etc/riser/riserd.yaml)" = "640 root:riser" ] || fail "mode $(mode /etc/riser/riserd.yaml)"
[ "$(mode /etc/riser/credentials)" = "700 root:root" ] || fail "mode $(mode /etc/riser/credentials)"
[ "$(mode /run/riserd/admin.sock)" = "660 riser:riser" ] || fail "mode $(mode /run/riserd/admin.sock)"
[ "$(ps -o user= -p "$(main_pid)")" = riser ] || fail "riserd does not run as user riser"
for page in riserd riserd-apply riser riser-attach riser-sa riser-iwpmd riser-iwpmd-query; do
    zgrep -q "$page" /usr/share/man/man1/$page.1.gz || fail "manual page $page is missing"
done
zgrep -q "listen" /usr/share/man/man5/riserd.yaml.5.gz || fail "manual page riserd.yaml is missing"
bash -n /usr/share/bash-completion/completions/riserd
bash -n /usr/share/bash-completion/completions/riser
grep -q '"targets"' /usr/share/riser/riserd.schema.json
grep -q "^# Riser" /usr/share/doc/riser/book/src/introduction.md
grep -q "A READ" /usr/share/doc/riser/book/src/developers/read.md
grep -q "configure.md" /usr/share/doc/riser/book/src/SUMMARY.md
for example in /usr/share/doc/riser/examples/*.yaml; do riserd check "$example" >/dev/null; done

echo "--- RDMA programs on the software NIC"
riser run -- ibv_devinfo | grep -q PORT_ACTIVE || fail "no RDMA device"
riser run --addr 127.0.0.1 -- ib_write_bw -n 100 &
SERVER=$!
wait_for 10 riser run --addr 127.0.0.2 -- ib_write_bw -n 100 127.0.0.1
wait "$SERVER"
# The package contains the links, so no directory must be created, which would fail in a read-only root.
TMPDIR=/nowhere XDG_RUNTIME_DIR=/nowhere riser run -- ibv_devinfo | grep -q PORT_ACTIVE || fail "the links to the libraries are missing"

echo "--- fabric services"
units=/usr/lib/systemd/system
systemd-analyze verify --man=no $units/riserd.service $units/riser@.service $units/riser-sa.service \
    $units/riser-sa-netlink.socket $units/riser-iwpmd.service
for unit in riser-sa.service riser-sa.socket riser-sa-netlink.socket riser-iwpmd.service; do
    [ "$(systemctl is-enabled $unit)" = disabled ] || fail "$unit is enabled"
    ! systemctl is-active -q $unit || fail "$unit is active"
done
# Without an address, the service fails once and is not restarted.
! systemctl start riser-sa || fail "riser-sa runs without an address"
journalctl -u riser-sa | grep -q -- --addr || fail "the log of riser-sa does not mention --addr"
systemctl is-failed -q riser-sa || fail "riser-sa is $(systemctl is-active riser-sa)"
# Programs connect to the socket of ibacm, which starts riser-sa.
echo 'RISER_SA_OPTIONS=--addr 127.0.0.9' >/etc/default/riser-sa
echo '127.0.0.7 far' >>/etc/hosts
systemctl start riser-sa.socket
ib_acme -f n -d far -v | grep -q "dgid: ::ffff:127.0.0.7" || fail "ib_acme does not find a path"
systemctl is-active riser-sa.service
sandboxed() {
    local status
    status=/proc/$(systemctl show -P MainPID "$1")/status
    grep -Eq '^NoNewPrivs:[[:space:]]1$' "$status" || fail "$1 can gain privileges"
    # Only CAP_NET_ADMIN.
    grep -Eq '^CapBnd:[[:space:]]0+1000$' "$status" || fail "$1 has other capabilities"
    ! grep -Eq '^Uid:[[:space:]]0' "$status" || fail "$1 is root"
    systemd-analyze security --no-pager --threshold=20 "$1" | tail -n 1
}
sandboxed riser-sa
# If the kernel supports RDMA, it sends requests to the other socket.
systemctl stop riser-sa.socket riser-sa.service
[ -s /var/lib/riser-sa/state ] || fail "the state of riser-sa is missing"
if systemctl start riser-sa-netlink.socket; then
    systemctl start riser-sa
    journalctl -u riser-sa | grep 'kernel=true' || fail "riser-sa does not use the kernel socket"
    systemctl stop riser-sa riser-sa-netlink.socket
fi
systemctl start riser-sa
echo 'RISER_IWPMD_OPTIONS=--no-kernel --map 127.0.0.10:3260=7300' >/etc/default/riser-iwpmd
systemctl start riser-iwpmd
[ "$(riser-iwpmd query 127.0.0.11:40000 127.0.0.10:3260)" = 127.0.0.10:7300 ] || fail "no mapping"
sandboxed riser-iwpmd
! journalctl -u riser-iwpmd | grep 'cannot drop capabilities' || fail "riser-iwpmd keeps capabilities"

echo "--- configured"
printf 'a secret of the test' >/etc/riser/credentials/host
cat >/etc/riser/riserd.yaml <<'Y'
backends:
  disk0: { kind: file, path: /var/lib/riser/disk0.img, size: 64MiB, create: true }
targets:
  - name: disks
    iqn: iqn.2026-01.com.example:disks
    portals:
      - { protocol: srp, listen: 127.0.0.1 }
      - { protocol: iscsi, listen: 127.0.0.1 }
    luns: { 0: disk0 }
    access: open
    chap: { users: [{ name: host, secret_credential: riser_host }] }
Y
# Credentials are read when the service starts.
systemctl restart riserd
riserd targets
riserd sessions -o json | grep -q '^\[\]'

echo "--- an invalid file is rejected without a restart"
pid=$(main_pid)
sed -i 's/access: open/acces: open/' /etc/riser/riserd.yaml
! systemctl reload riserd || fail "the invalid file was loaded"
sed -i 's/acces: open/access: open/' /etc/riser/riserd.yaml
systemctl reload riserd
[ "$(main_pid)" = "$pid" ] || fail "riserd was restarted"

echo "--- root saves the configuration file of the service"
riserd save /etc/riser/riserd.yaml
[ "$(mode /etc/riser/riserd.yaml)" = "640 root:riser" ] || fail "mode $(mode /etc/riser/riserd.yaml)"
[ "$(mode /etc/riser/riserd.yaml~)" = "600 root:root" ] || fail "mode $(mode /etc/riser/riserd.yaml~)"
mv /etc/riser/riserd.yaml~ /tmp/riserd.yaml
systemctl reload riserd
systemctl restart riserd
riserd targets

echo "--- attached by a service"
cat >/etc/riser/attachments/disk0 <<'Y'
URL=iscsi://host@127.0.0.1/iqn.2026-01.com.example:disks/0
EXPORT=--fuse /mnt
RISER_CHAP_PASSWORD=a secret of the test
Y
systemctl enable --now riser@disk0
# The attachment starts at the next boot.
systemctl show -P Wants multi-user.target | grep -qw riser@disk0.service || fail "the next boot does not attach the disk"
# While the target is not available, the boot must not wait for the attachment.
! systemctl show -P Before riser@disk0.service | grep -Eq 'multi-user|remote-fs' || fail "the boot waits for the disk"
riser list
write_pattern
check_pattern

echo "--- restarted while attached"
systemctl restart riserd
check_pattern
write_pattern
check_pattern

echo "--- upgraded in place while attached, in the sandbox"
pid=$(main_pid) before=$(restarts)
riserd upgrade
[ "$(main_pid)" = "$pid" ] && [ "$(restarts)" = "$before" ] || fail "riserd was restarted"
systemctl is-active riserd.service riserd.socket
riserd status | grep -q 'upgraded from'
! riserd upgrade --binary /bin/false || fail "a program other than riserd was accepted"
check_pattern
write_pattern
check_pattern

echo "--- hung: the watchdog restarts it"
mkdir -p /run/systemd/system/riserd.service.d
printf '[Service]\nWatchdogSec=3\n' >/run/systemd/system/riserd.service.d/test.conf
systemctl daemon-reload
systemctl restart riserd
before=$(restarts)
kill -STOP "$(main_pid)"
restarted() { [ "$(restarts)" -gt "$before" ] && systemctl is-active riserd; }
wait_for 30 restarted
# It does not restart a healthy daemon.
sleep 8
[ "$(restarts)" = $((before + 1)) ] || fail "the watchdog restarted a healthy daemon"
check_pattern

echo "--- in the sandbox"
for set in CapInh CapPrm CapEff CapBnd CapAmb; do
    grep -Eq "^$set:[[:space:]]0+$" "/proc/$(main_pid)/status" || fail "riserd has a capability in $set"
done
grep -Eq '^NoNewPrivs:[[:space:]]1$' "/proc/$(main_pid)/status" || fail "riserd can gain privileges"
# The number of the service manager's filters varies.
filters() { sed -n 's/^Seccomp_filters:[[:space:]]*//p' "/proc/$(main_pid)/status"; }
all=$(filters)
printf '[Service]\nEnvironment=RISERD_SANDBOX=off\n' >/run/systemd/system/riserd.service.d/test.conf
systemctl daemon-reload
systemctl restart riserd
[ "$all" = $(($(filters) + 2)) ] || fail "riserd did not install its own filters"
rm /run/systemd/system/riserd.service.d/test.conf
systemctl daemon-reload
systemctl restart riserd
check_pattern
! journalctl -u riserd | grep 'cannot enter the full sandbox' || fail "riserd cannot enter its full sandbox"
# The maximum is 100; the current value is 20 with systemd 252.
systemd-analyze security --no-pager --threshold=25 riserd | tail -n 1
# riser only needs root to mount disks.
attached=$(systemctl show -P MainPID riser@disk0)
grep -Eq '^NoNewPrivs:[[:space:]]1$' "/proc/$attached/status" || fail "riser can gain privileges"
systemd-analyze security --no-pager --threshold=55 riser@disk0 | tail -n 1

echo "--- as user nobody, without capabilities, as in a container"
cat >/tmp/nobody.yaml <<'Y'
backends: { disk0: { kind: ram, size: 1MiB } }
targets:
  - { name: disk, portals: [{ protocol: srp, listen: 127.0.0.3 }], luns: { 0: disk0 }, access: open }
Y
mkdir -p -m 777 /tmp/nobody
as_nobody=(setpriv --reuid 65534 --regid 65534 --clear-groups --no-new-privs --bounding-set -all
    env XDG_RUNTIME_DIR=/tmp/nobody)
"${as_nobody[@]}" riserd run --config /tmp/nobody.yaml &
NOBODY=$!
wait_for 10 "${as_nobody[@]}" riserd status
"${as_nobody[@]}" riser inquiry srp://127.0.0.3/0 --addr 127.0.0.4 >/dev/null
kill "$NOBODY"
wait "$NOBODY"

echo "--- upgraded"
SA=$(systemctl show -P MainPID riser-sa)
dpkg -i /test/new.deb
[ "$(version)" != "$OLD" ] || fail "the version is still $OLD"
systemctl is-active riserd.service riserd.socket riser@disk0 riser-sa.service riser-sa.socket riser-iwpmd
[ "$(systemctl show -P MainPID riser-sa)" != "$SA" ] || fail "riser-sa was not restarted"
grep -q disks /etc/riser/riserd.yaml || fail "the configuration was removed"
check_pattern
write_pattern
check_pattern

echo "--- removed"
systemctl stop riser@disk0
dpkg -r riser
for unit in riserd riser-sa.service riser-sa.socket riser-iwpmd; do
    ! systemctl is-active $unit || fail "$unit is still active"
done
[ ! -e /usr/bin/riserd ] && [ -e /etc/riser/riserd.yaml ] || fail "the program was not removed, or the configuration was removed"
cmp -n $((8 << 20)) /tmp/pattern /var/lib/riser/disk0.img

echo "--- purged"
dpkg -P riser
[ ! -e /etc/default/riser-sa ] && [ ! -e /etc/default/riser-iwpmd ] || fail "option files were not removed"
[ ! -e /var/lib/riser-sa ] && [ ! -e /var/lib/private/riser-sa ] || fail "the state of riser-sa was not removed"
[ ! -e /etc/riser ] && [ ! -e /var/lib/riserd ] || fail "directories were not removed: $(ls -R /etc/riser /var/lib/riserd)"
# Disks are kept.
cmp -n $((8 << 20)) /tmp/pattern /var/lib/riser/disk0.img
echo "--- passed"
