#: group: iser
#: about: libiscsi's suite over iSER, a process per test: only what is listed fails
#: limit: 3600
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
# Reservations of a client that died would be in the way of the next, so riserd starts again; but first
# it must have outlived the client.
client_died() {
    timeout 60 env LD_PRELOAD="$OUTCOME/client.so" iscsi-inq "iser://$PORTAL/$IQN/0" | grep RISER ||
        fail "riserd does not answer after the client's end"
    kill_serving
    serve_again
}
libiscsi_suite "iser://$PORTAL/$IQN/0"
stop_serving
wrong=$(libiscsi_unexpected 150)
[ -z "$wrong" ] || fail "$wrong"
