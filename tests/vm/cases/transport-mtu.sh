#: group: transport
#: about: all operations with all path MTUs, lengths up to 64 MiB, in both directions
#: limit: 1200
#: short: no
# The MTU of the interface is sufficient for a path MTU and its headers, but not for the next larger
# path MTU. The emulated kernel processes a few thousand packets per second, so we use shorter
# messages with shorter packets.
for trio in 256:400:4 512:700:8 1024:1500:16 2048:2300:32 4096:4500:64; do
    IFS=: read -r mtu interface mib <<<"$trio"
    two_hosts "$interface"
    export RISER_MTU=$mtu RISER_LENGTH=$((mib << 20))
    on_devices rdma_core:10.99.0.1 roce:10.99.0.2@peer stress::sizes stress::late
    one_host
done
