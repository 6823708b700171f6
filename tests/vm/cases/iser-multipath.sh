#: group: iser
#: about: dm-multipath over two portals with ib_iser, one of them disconnected and reconnected
#: limit: 400
TRANSPORT=iser
. /vm/iscsi.sh
two_paths_one_cut
