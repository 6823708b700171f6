#: group: iscsi
#: about: dm-multipath over two portals with iscsi_tcp, one of them disconnected and reconnected
#: limit: 400
TRANSPORT=tcp
. /vm/iscsi.sh
two_paths_one_cut
