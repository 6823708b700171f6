#: group: libiscsi-tgt
#: about: libiscsi's suite over iSER into tgt, to compare
#: limit: 1200
. /vm/tgt.sh
. /vm/libiscsi.sh
tgt_rig
LIMIT=10 libiscsi_suite "iser://10.99.0.1:3260/$TGT_IQN/1"
