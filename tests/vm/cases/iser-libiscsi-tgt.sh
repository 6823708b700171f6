#: group: libiscsi-tgt
#: about: libiscsi suite over iSER with tgt: listed tests also fail there
#: limit: 3600
#: packets: none
. /vm/tgt.sh
. /vm/libiscsi.sh
tgt_rig
LIMIT=30 libiscsi_suite "iser://10.99.0.1:3260/$TGT_IQN/1"
[ "$(libiscsi_count passed)" -ge 50 ] || fail "too few tests passed"
wrong=$(libiscsi_not_the_client)
[ -z "$wrong" ] || fail "$wrong"
