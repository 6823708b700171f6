#: group: iser
#: about: libiscsi's suite over iSER, a process per test: nothing fails where the client lives
#: limit: 1800
TRANSPORT=iser
. /vm/iscsi.sh
. /vm/libiscsi.sh
two_hosts
trap iscsi_clean EXIT
# One test takes it for granted that physical blocks are as long as logical ones, as they are in memory.
iscsi_config 24 10.99.0.2 |
    sed 's/kind: file, path: [^,]*, size: 24MiB, create: true/kind: ram, size: 24MiB/' >/tmp/ram.yaml
grep -q 'kind: ram' /tmp/ram.yaml
serve </tmp/ram.yaml
# Reservations of a client that died would be in the way of the next.
client_died() {
    kill_serving
    serve_again
}
libiscsi_suite "iser://$PORTAL/$IQN/0"
stop_serving
[ ! -e /tmp/suite-stopped ] || fail "riserd answers no more"
failures=$(libiscsi_failures)
[ -z "$failures" ] || fail "these failed: ${failures//$'\n'/ }"
