#: group: iser
#: about: libiscsi's suite over iSER, a process per test: nothing fails where the client lives
#: limit: 1800
TRANSPORT=iser
. /vm/iscsi.sh
. /vm/libiscsi.sh
iscsi_rig 24
# Reservations of a client that died would be in the way of the next.
client_died() {
    kill_serving
    iscsi_serve_again
}
libiscsi_suite "iser://$PORTAL/$IQN/0"
stop_serving
[ ! -e /tmp/suite-stopped ] || fail "riserd answers no more"
failures=$(libiscsi_failures)
[ -z "$failures" ] || fail "these failed: ${failures//$'\n'/ }"
