#: group: iscsi
#: about: link of iscsi_tcp is disconnected and reconnected during writes, detected by NOPs
#: limit: 400
TRANSPORT=tcp
. /vm/iscsi.sh
link_is_cut
