#: group: libiscsi-lio
#: about: libiscsi's suite over iSER into the kernel's target, to compare
#: limit: 1200
SCHEME=iser
. /vm/lio.sh
. /vm/libiscsi.sh
lio_rig
# A target that has wedged cannot be taken down; the guest goes with the group.
trap - EXIT
LIMIT=10 libiscsi_suite "$TARGET/0"
end_capture
