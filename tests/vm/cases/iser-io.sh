#: group: iser
#: about: verified I/O of ib_iser from 512 B to 4 MiB
#: limit: 400
TRANSPORT=iser
. /vm/iscsi.sh
io_of_every_size
