#!/bin/bash
# What happens to a Debian system when Riser is installed, used, upgraded, removed and purged. It runs
# as a service in a root made for it, whose init is systemd; /test has old.deb and new.deb.
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
        [ $SECONDS -lt $end ] || fail "waited $seconds s for: $*"
        sleep 0.1
    done
}

trap 'fail "line $LINENO: $BASH_COMMAND"' ERR

version() { dpkg-query -W -f '${Version}' riser; }
restarts() { systemctl show -P NRestarts riserd; }
main_pid() { systemctl show -P MainPID riserd; }
mode() { stat -c '%a %U:%G' "$1"; }

# What was written by `written` is still there, through the attachment.
written() {
    dd if=/dev/urandom of=/tmp/pattern bs=1M count=8 status=none
    dd if=/tmp/pattern of=/mnt/lun0 bs=1M conv=notrunc,fsync status=none
}
is_there() {
    cmp -n $((8 << 20)) /tmp/pattern /mnt/lun0 || fail "other data than were written"
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
[ "$(ps -o user= -p "$(main_pid)")" = riser ] || fail "riserd is not user riser"
for page in riserd riserd-apply riser riser-attach riser-sa riser-iwpmd riser-iwpmd-query; do
    zgrep -q "$page" /usr/share/man/man1/$page.1.gz || fail "no manual page $page"
done
zgrep -q "listen" /usr/share/man/man5/riserd.yaml.5.gz || fail "no manual page riserd.yaml"
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
# Links in the package: no folder has to be made, as in a root that is read-only.
TMPDIR=/nowhere XDG_RUNTIME_DIR=/nowhere riser run -- ibv_devinfo | grep -q PORT_ACTIVE || fail "no links"

echo "--- services of a fabric"
units=/usr/lib/systemd/system
systemd-analyze verify --man=no $units/riserd.service $units/riser@.service $units/riser-sa.service \
    $units/riser-sa-netlink.socket $units/riser-iwpmd.service
for unit in riser-sa.service riser-sa.socket riser-sa-netlink.socket riser-iwpmd.service; do
    [ "$(systemctl is-enabled $unit)" = disabled ] || fail "$unit is enabled"
    ! systemctl is-active -q $unit || fail "$unit runs"
done
# Without an address: an end, and no attempt after the other.
! systemctl start riser-sa || fail "riser-sa runs without an address"
journalctl -u riser-sa | grep -q -- --addr || fail "riser-sa does not say what it needs"
systemctl is-failed -q riser-sa || fail "riser-sa is $(systemctl is-active riser-sa)"
# Programs find it at ibacm's socket, whose place it takes; one of them starts it.
echo 'RISER_SA_OPTIONS=--addr 127.0.0.9' >/etc/default/riser-sa
echo '127.0.0.7 far' >>/etc/hosts
systemctl start riser-sa.socket
ib_acme -f n -d far -v | grep -q "dgid: ::ffff:127.0.0.7" || fail "ib_acme finds no path"
systemctl is-active riser-sa.service
sandboxed() {
    local status
    status=/proc/$(systemctl show -P MainPID "$1")/status
    grep -Eq '^NoNewPrivs:[[:space:]]1$' "$status" || fail "$1 may gain privileges"
    # CAP_NET_ADMIN alone.
    grep -Eq '^CapBnd:[[:space:]]0+1000$' "$status" || fail "$1 has other capabilities"
    ! grep -Eq '^Uid:[[:space:]]0' "$status" || fail "$1 is root"
    systemd-analyze security --no-pager --threshold=20 "$1" | tail -n 1
}
sandboxed riser-sa
# This kernel may be without RDMA; with it, the kernel's questions come by the other socket.
systemctl stop riser-sa.socket riser-sa.service
[ -s /var/lib/riser-sa/state ] || fail "no state of riser-sa"
if systemctl start riser-sa-netlink.socket; then
    systemctl start riser-sa
    journalctl -u riser-sa | grep 'kernel=true' || fail "riser-sa has not the kernel's socket"
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
# A credential is read when the service starts.
systemctl restart riserd
riserd targets
riserd sessions -o json | grep -q '^\[\]'

echo "--- a mistake is refused, and harms nothing"
pid=$(main_pid)
sed -i 's/access: open/acces: open/' /etc/riser/riserd.yaml
! systemctl reload riserd || fail "the mistake was taken"
sed -i 's/acces: open/access: open/' /etc/riser/riserd.yaml
systemctl reload riserd
[ "$(main_pid)" = "$pid" ] || fail "it was restarted"

echo "--- root saves the file that the service reads"
riserd save /etc/riser/riserd.yaml
[ "$(mode /etc/riser/riserd.yaml)" = "640 root:riser" ] || fail "mode $(mode /etc/riser/riserd.yaml)"
[ "$(mode /etc/riser/riserd.yaml~)" = "600 root:root" ] || fail "mode $(mode /etc/riser/riserd.yaml~)"
mv /etc/riser/riserd.yaml~ /tmp/riserd.yaml
systemctl reload riserd
systemctl restart riserd
riserd targets

echo "--- attached by a unit of its own"
cat >/etc/riser/attachments/disk0 <<'Y'
URL=iscsi://host@127.0.0.1/iqn.2026-01.com.example:disks/0
EXPORT=--fuse /mnt
RISER_CHAP_PASSWORD=a secret of the test
Y
systemctl enable --now riser@disk0
# The next boot starts what this target wants.
systemctl show -P Wants multi-user.target | grep -qw riser@disk0.service || fail "the next boot does not attach it"
systemctl show -P Before riser@disk0.service | grep -qw remote-fs-pre.target || fail "fstab may mount it too early"
riser list
written
is_there

echo "--- restarted under it"
systemctl restart riserd
is_there
written
is_there

echo "--- handed over under it, in the sandbox"
pid=$(main_pid) before=$(restarts)
riserd upgrade
[ "$(main_pid)" = "$pid" ] && [ "$(restarts)" = "$before" ] || fail "it was restarted"
systemctl is-active riserd.service riserd.socket
riserd status | grep -q 'upgraded from'
! riserd upgrade --binary /bin/false || fail "a program that is no riserd was taken"
is_there
written
is_there

echo "--- hung: the watchdog restarts it"
mkdir -p /run/systemd/system/riserd.service.d
printf '[Service]\nWatchdogSec=3\n' >/run/systemd/system/riserd.service.d/test.conf
systemctl daemon-reload
systemctl restart riserd
before=$(restarts)
kill -STOP "$(main_pid)"
restarted() { [ "$(restarts)" -gt "$before" ] && systemctl is-active riserd; }
wait_for 30 restarted
# And not without need.
sleep 8
[ "$(restarts)" = $((before + 1)) ] || fail "the watchdog bites a daemon that is well"
is_there

echo "--- in the sandbox"
for set in CapInh CapPrm CapEff CapBnd CapAmb; do
    grep -Eq "^$set:[[:space:]]0+$" "/proc/$(main_pid)/status" || fail "riserd has a capability in $set"
done
grep -Eq '^NoNewPrivs:[[:space:]]1$' "/proc/$(main_pid)/status" || fail "riserd may gain privileges"
# Beside the service manager's filters, of which there may be any number.
filters() { sed -n 's/^Seccomp_filters:[[:space:]]*//p' "/proc/$(main_pid)/status"; }
all=$(filters)
printf '[Service]\nEnvironment=RISERD_SANDBOX=off\n' >/run/systemd/system/riserd.service.d/test.conf
systemctl daemon-reload
systemctl restart riserd
[ "$all" = $(($(filters) + 2)) ] || fail "riserd has not installed its own filters"
rm /run/systemd/system/riserd.service.d/test.conf
systemctl daemon-reload
systemctl restart riserd
is_there
! journalctl -u riserd | grep 'cannot enter the full sandbox' || fail "riserd could not enter its sandbox"
# Of 100; it is 20 with systemd 252.
systemd-analyze security --no-pager --threshold=25 riserd | tail -n 1
# What attaches disks mounts them, and has nothing else to do with root.
attached=$(systemctl show -P MainPID riser@disk0)
grep -Eq '^NoNewPrivs:[[:space:]]1$' "/proc/$attached/status" || fail "riser may gain privileges"
systemd-analyze security --no-pager --threshold=55 riser@disk0 | tail -n 1

echo "--- as nobody, without a capability, as in a container"
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
[ "$(systemctl show -P MainPID riser-sa)" != "$SA" ] || fail "riser-sa is that of the old package"
grep -q disks /etc/riser/riserd.yaml || fail "the configuration is gone"
is_there
written
is_there

echo "--- removed"
systemctl stop riser@disk0
dpkg -r riser
for unit in riserd riser-sa.service riser-sa.socket riser-iwpmd; do
    ! systemctl is-active $unit || fail "$unit still runs"
done
[ ! -e /usr/bin/riserd ] && [ -e /etc/riser/riserd.yaml ] || fail "not what removal leaves"
cmp -n $((8 << 20)) /tmp/pattern /var/lib/riser/disk0.img

echo "--- purged"
dpkg -P riser
[ ! -e /etc/default/riser-sa ] && [ ! -e /etc/default/riser-iwpmd ] || fail "options are left"
[ ! -e /var/lib/riser-sa ] && [ ! -e /var/lib/private/riser-sa ] || fail "the state of riser-sa is left"
[ ! -e /etc/riser ] && [ ! -e /var/lib/riserd ] || fail "something is left: $(ls -R /etc/riser /var/lib/riserd)"
# Not the disks.
cmp -n $((8 << 20)) /tmp/pattern /var/lib/riser/disk0.img
echo "--- all is well"
