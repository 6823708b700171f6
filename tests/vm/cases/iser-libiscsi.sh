#: group: iser
#: about: libiscsi's suite over iSER, a process per test: nothing fails where the client lives
#: limit: 1800
TRANSPORT=iser
. /vm/iscsi.sh
. /vm/libiscsi.sh
iscsi_rig 24
libiscsi_suite "iser://$PORTAL/$IQN/0"
stop_serving
[ ! -s /tmp/suite-failed ] || fail "these failed: $(tr '\n' ' ' </tmp/suite-failed)"
