#: group: srp
#: about: riserd on rdma_core: sg_reset of device, bus and host during writes
#: limit: 300
CORE=yes
. "$RISER_ROOT/tests/vm/cases/srp-reset.sh"
