# Creates an interface, using a type supported by the kernel, and a new `/dev` in the directory `$1` that
# contains the files required by programs. The remaining arguments are addresses.
set -e
dev=$1
shift
ip link set lo up
ip link add rdma0 type dummy 2>/dev/null || ip link add rdma0 type bridge 2>/dev/null ||
    ip link add rdma0 type veth
for address; do ip address add "$address/32" dev rdma0; done
# ibacm uses multicast groups of IPv6, which may not be available in the kernel.
for n in 1 2 3; do ip address add "fd17::$n/64" dev rdma0 nodad || true; done
ip link set rdma0 up
mount -t tmpfs -o mode=755 none "$dev"
mkdir "$dev/shm" "$dev/infiniband"
chmod 1777 "$dev/shm"
for name in null zero full random urandom tty; do
    : >"$dev/$name"
    mount --bind "/dev/$name" "$dev/$name"
done
ln -s /proc/self/fd "$dev/fd"
ln -s ../null "$dev/infiniband/uverbs0"
ln -s ../null "$dev/infiniband/uverbs1"
mount --rbind "$dev" /dev
echo ready
exec sleep infinity
