#: group: libiscsi-lio
#: about: libiscsi's suite over iSER into the kernel's target: what is listed does not pass there either
#: limit: 3600
#: packets: none
SCHEME=iser
. /vm/lio.sh
. /vm/libiscsi.sh
lio_rig
# A target that has wedged cannot be taken down; the guest goes with the group.
trap - EXIT
LIMIT=30 libiscsi_suite "$TARGET/0"
end_capture
[ "$(libiscsi_count passed)" -ge 50 ] || fail "hardly a test passed"
wrong=$(libiscsi_not_the_client)
[ -z "$wrong" ] || fail "$wrong"
