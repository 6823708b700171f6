#: group: srp
#: about: riserd on rdma_core: 1, 12 and 255 descriptors per request, with and without indirect tables
#: limit: 600
CORE=yes
. "$RISER_ROOT/tests/vm/cases/srp-sg-entries.sh"
