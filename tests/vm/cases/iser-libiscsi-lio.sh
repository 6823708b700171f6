#: group: lio
#: about: libiscsi's suite over iSER into the kernel's target, to compare
#: limit: 2400
SCHEME=iser
. /vm/lio.sh
. /vm/libiscsi.sh
lio_rig
libiscsi_suite "$TARGET/0"
