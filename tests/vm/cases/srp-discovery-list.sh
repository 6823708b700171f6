#: group: srp-discovery
#: about: srp_daemon and ibsrpdm list the targets of riserd, found by riser-sa and device management
#: limit: 420
. "$RISER_ROOT/tests/vm/sa.sh"
. "$RISER_ROOT/tests/vm/discovery.sh"
ib_hosts
trap not_discoverable EXIT
administrator

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

# The port is found by its capability: IsDeviceManagementSupported is bit 19.
timeout 100 saquery -C ibrxe0 -P 1 PIR 3 | tee /tmp/port
grep -q "CapMask\.*0x90000" /tmp/port || fail "the capability mask of LID 3 is not 0x90000"
echo "result: $(wc -l </tmp/srp_daemon) targets"
stop_serving
