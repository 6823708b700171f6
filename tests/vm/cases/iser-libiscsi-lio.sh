#: group: libiscsi-lio
#: about: libiscsi's suite over iSER into the kernel's target: what is listed does not pass there either
#: limit: 3600
#: packets: none
SCHEME=iser
. /vm/lio.sh
. /vm/libiscsi.sh
lio_rig
# What is listed, and plain reads and writes beside it. LIO's kernel fails others for reasons of its own,
# and may dereference a null pointer (`target_submit`) when a client dies with commands under way in them.
ONLY='Inquiry|Mandatory|ModeSense6|ExtendedCopy.Simple|Read[0-9]|ReadCapacity|Write[0-9]|Verify[0-9]|Reserve6|iSCSI'
# A target that has wedged cannot be taken down; the guest goes with the group.
trap - EXIT
LIMIT=30 libiscsi_suite "$TARGET/0"
end_capture
[ "$(libiscsi_count passed)" -ge 50 ] || fail "hardly a test passed"
wrong=$(libiscsi_not_the_client)
[ -z "$wrong" ] || fail "$wrong"
