#: group: lio
#: about: libiscsi's suite over iSER into the kernel's target, to compare
#: limit: 1200
SCHEME=iser
. /vm/lio.sh
. /vm/libiscsi.sh
lio_rig
LIMIT=10 libiscsi_suite "$TARGET/0"
