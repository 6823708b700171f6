#: group: transport
#: about: every operation and length up to 64 MiB at every path MTU, both ways
#: limit: 1200
#: short: no
# Interfaces that carry a path MTU and its headers, but not the next larger one.
for pair in 256:400 512:700 1024:1500 2048:2300 4096:4500; do
    two_hosts "${pair#*:}"
    export RISER_MTU=${pair%:*} RISER_LENGTH=$((64 << 20))
    on_devices rdma_core:10.99.0.1 roce:10.99.0.2@peer stress::sizes stress::late
    one_host
done
