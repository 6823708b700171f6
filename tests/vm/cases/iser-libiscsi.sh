#: group: iser
#: about: libiscsi suite over iSER, one process per test: only listed tests fail
#: limit: 3600
TRANSPORT=iser
. /vm/iscsi.sh
. /vm/libiscsi.sh
two_hosts
trap iscsi_clean EXIT
# One test requires that the physical block size is equal to the logical block size, which is only
# true for a RAM disk.
iscsi_config 24 10.99.0.2 |
    sed 's/kind: file, path: [^,]*, size: 24MiB, create: true/kind: ram, size: 24MiB/' >/tmp/ram.yaml
grep -q 'kind: ram' /tmp/ram.yaml
serve </tmp/ram.yaml
# Reservations of a crashed client would affect the next test, so riserd is restarted. But first we
# check that it's still working.
client_died() {
    timeout 60 env LD_PRELOAD="$OUTCOME/client.so" iscsi-inq "iser://$PORTAL/$IQN/0" | grep RISER ||
        fail "riserd does not respond after the client exited"
    kill_serving
    serve_again
}
libiscsi_suite "iser://$PORTAL/$IQN/0"
stop_serving
wrong=$(libiscsi_unexpected 150)
[ -z "$wrong" ] || fail "$wrong"
