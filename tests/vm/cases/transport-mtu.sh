#: group: transport
#: about: every operation at every path MTU, lengths up to 64 MiB, both ways
#: limit: 1200
#: short: no
# Interfaces that carry a path MTU and its headers, but not the next larger one.
# The emulated kernel takes some thousand packets in a second, so short packets carry shorter messages.
for trio in 256:400:4 512:700:8 1024:1500:16 2048:2300:32 4096:4500:64; do
    IFS=: read -r mtu interface mib <<<"$trio"
    two_hosts "$interface"
    export RISER_MTU=$mtu RISER_LENGTH=$((mib << 20))
    on_devices rdma_core:10.99.0.1 roce:10.99.0.2@peer stress::sizes stress::late
    one_host
done
