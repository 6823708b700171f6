#: group: iser
#: about: link of ib_iser is disconnected and reconnected during writes, detected by NOPs
#: limit: 400
TRANSPORT=iser
. /vm/iscsi.sh
link_is_cut
