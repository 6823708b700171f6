#: group: libiscsi-lio
#: about: libiscsi suite over iSER with the kernel's target: listed tests also fail there
#: limit: 3600
#: packets: none
SCHEME=iser
. /vm/lio.sh
. /vm/libiscsi.sh
lio_rig
# Only run the listed tests, and simple reads and writes. LIO fails other tests for different
# reasons, and may dereference a null pointer (`target_submit`) if a client crashes with commands in
# flight.
ONLY='Inquiry|Mandatory|ModeSense6|ExtendedCopy.Simple|Read[0-9]|ReadCapacity|Write[0-9]|Verify[0-9]|Reserve6|iSCSI'
# A hung target can't be removed, so the guest is stopped with the group.
trap - EXIT
LIMIT=30 libiscsi_suite "$TARGET/0"
end_capture
[ "$(libiscsi_count passed)" -ge 50 ] || fail "too few tests passed"
wrong=$(libiscsi_not_the_client)
[ -z "$wrong" ] || fail "$wrong"
