#: group: tgt
#: about: libiscsi's suite over iSER into tgt, to compare
#: limit: 2400
. /vm/tgt.sh
. /vm/libiscsi.sh
tgt_rig
libiscsi_suite "iser://10.99.0.1:3260/$TGT_IQN/1"
