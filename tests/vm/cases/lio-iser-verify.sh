#: group: lio
#: about: verified I/O of riser from 512 B to 4 MiB to the kernel's target over iSER
#: limit: 420
SCHEME=iser
. /vm/lio.sh
verified_io
