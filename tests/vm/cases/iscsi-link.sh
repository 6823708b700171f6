#: group: iscsi
#: about: iscsi_tcp's link is cut and mended while it writes; NOPs notice
#: limit: 400
TRANSPORT=tcp
. /vm/iscsi.sh
link_is_cut
