#: group: srp-discovery
#: about: srp_daemon and ibsrpdm list the targets of riserd, found by riser-sa and device management
#: limit: 420
. "$RISER_ROOT/tests/vm/sa.sh"
. "$RISER_ROOT/tests/vm/discovery.sh"
ib_hosts
trap not_discoverable EXIT
administrator
# srp_daemon compares the targets with the hosts of ib_srp.
modprobe scsi_mod

# Runs srp_daemon of Debian's srptools once, with no rules: list FILE
list() {
    timeout 100 srp_daemon -o -c -a -f /dev/null -i ibrxe0 -p 1 >"$1"
}

# Without a port that supports device management, there are no targets.
list /tmp/none
[ ! -s /tmp/none ] || fail "found targets before riserd was started: $(cat /tmp/none)"

discoverable
list /tmp/srp_daemon
cat /tmp/srp_daemon
for guid in $FIRST $SECOND; do
    grep -qxF "$(login_of $guid)" /tmp/srp_daemon || fail "the target $guid is missing"
done
[ "$(wc -l </tmp/srp_daemon)" = 2 ] || fail "srp_daemon listed $(wc -l </tmp/srp_daemon) services"

# ibsrpdm lists the same, and the properties of the controllers.
timeout 100 ibsrpdm -c -d /dev/infiniband/umad0 | diff - /tmp/srp_daemon
timeout 100 ibsrpdm -d /dev/infiniband/umad0 | tee /tmp/controllers
for words in "port LID: *0003" "port GID: *$PORT_GID" "GUID: *$FIRST" "ID: *first" "ID: *second" \
    "Maximum size of Send Messages in bytes: 8260" "service entries: 2" "$SECOND / SRP.T10:$SECOND"; do
    grep -q "$words" /tmp/controllers || fail "ibsrpdm does not show $words"
done

# The administrator reports the capability by which the port was found.
timeout 100 saquery -C ibrxe0 -P 1 PIR 3 >/tmp/port
grep -q IsDeviceManagementSupported /tmp/port || fail "LID 3 does not support device management: $(cat /tmp/port)"
echo "result: $(wc -l </tmp/srp_daemon) targets"
stop_serving
