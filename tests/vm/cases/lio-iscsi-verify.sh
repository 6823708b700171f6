#: group: lio
#: about: verified I/O of riser from 512 B to 4 MiB to the kernel's target over TCP
#: limit: 420
SCHEME=iscsi
. /vm/lio.sh
verified_io
