#: group: iser
#: about: riserd on rdma_core: ib_iser logs in twice, verified I/O from 512 B to 4 MiB
#: limit: 400
TRANSPORT=iser CORE=yes
. /vm/iscsi.sh
iscsi_rig 64 "limits: { max_transfer: 8MiB, buffer_pool_mib: 64 }"
iscsi_node
for bs in 4k 1m; do
    iscsi_login
    verify "$DISK" 8m --bs=$bs --iodepth=8
    verify "$DISK" 8m --bsrange=512-256k --iodepth=8
    iscsi_logout
done
iscsi_login
verify "$DISK" 24m --bs=4m --iodepth=4
iscsi_logout
stop_serving
