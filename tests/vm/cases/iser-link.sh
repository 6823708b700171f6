#: group: iser
#: about: ib_iser's link is cut and mended while it writes; NOPs notice
#: limit: 400
TRANSPORT=iser
. /vm/iscsi.sh
link_is_cut
