#: group: iser
#: about: dm-multipath over two portals with ib_iser, one of them cut and mended
#: limit: 400
TRANSPORT=iser
. /vm/iscsi.sh
two_paths_one_cut
