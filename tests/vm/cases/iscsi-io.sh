#: group: iscsi
#: about: verified I/O of iscsi_tcp from 512 B to 4 MiB
#: limit: 400
TRANSPORT=tcp
. /vm/iscsi.sh
io_of_every_size
