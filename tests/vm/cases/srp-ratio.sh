#: group: srp
#: about: riserd on rdma_core beside the kernel's ib_srpt: the same initiator, device, backing file
#: limit: 600
ulimit -l unlimited
dummy_host
trap ratio_clean EXIT
T=/sys/kernel/config/target
ratio_clean() {
    kernel_target_end || true
    core_clean
}
measure() {
    local name=$1
    fio --name=random --filename="$DISK" --size=64m --rw=randread --bs=4k --iodepth=16 --direct=1 \
        --ioengine=libaio --time_based --runtime=12 --ramp_time=3 --output-format=json >"$KEEP/$name-random.json"
    fio --name=sequential --filename="$DISK" --size=64m --rw=read --bs=128k --iodepth=8 --direct=1 \
        --ioengine=libaio --time_based --runtime=12 --ramp_time=3 --output-format=json >"$KEEP/$name-sequential.json"
}
kernel_target() {
    modprobe -a target_core_mod target_core_file ib_srpt
    mountpoint -q /sys/kernel/config || mount -t configfs configfs /sys/kernel/config
    mkdir -p $T/core/fileio_0/f0
    echo "fd_dev_name=$IMAGES/disk0.img,fd_dev_size=$((64 << 20)),fd_buffered_io=1" >$T/core/fileio_0/f0/control
    echo 1 >$T/core/fileio_0/f0/enable
    mkdir -p $T/srpt
    local gid
    gid=$(cat /sys/class/infiniband/rxe0/ports/1/gids/0)
    W=${gid:20}
    mkdir -p "$T/srpt/$W/$W/lun/lun_0"
    ln -s $T/core/fileio_0/f0 "$T/srpt/$W/$W/lun/lun_0/f0"
    mkdir -p "$T/srpt/$W/$W/acls/10.99.0.1/lun_0"
    ln -s "$T/srpt/$W/$W/lun/lun_0" "$T/srpt/$W/$W/acls/10.99.0.1/lun_0/l"
    echo 1 >"$T/srpt/$W/$W/enable"
    echo 5556 >$T/srpt/discovery_auth/rdma_cm_port
}
kernel_target_end() {
    [ -d $T/srpt ] || return 0
    echo 0 >"$T/srpt/$W/$W/enable"
    rm "$T/srpt/$W/$W/acls/10.99.0.1/lun_0/l" "$T/srpt/$W/$W/lun/lun_0/f0"
    rmdir "$T/srpt/$W/$W/acls/10.99.0.1/lun_0" "$T/srpt/$W/$W/acls/10.99.0.1" \
        "$T/srpt/$W/$W/lun/lun_0" "$T/srpt/$W/$W" "$T/srpt/$W" $T/srpt
    rmdir $T/core/fileio_0/f0 $T/core/fileio_0
    modprobe -r ib_srpt
}
core_config >/tmp/riserd.yaml
core_serve
head -c 64M /dev/urandom >/tmp/fill
load_srp
srp_login ch_count=2
dd if=/tmp/fill of="$DISK" bs=1M oflag=direct status=none
measure riserd
srp_logout
stop_serving
kernel_target
G=$(cat /sys/module/ib_srpt/parameters/srpt_service_guid)
wait_for 30 srp_add 10.99.0.1:5556 "${G#0x}" ch_count=2
wait_for 60 find_disk 0
measure kernel
srp_logout
python3 - "$KEEP" <<'P'
import json, sys
def read(name):
    with open(f"{sys.argv[1]}/{name}.json") as f:
        text = f.read()
    return json.loads(text[text.index("{"):])["jobs"][0]["read"]
for what, key, unit in (("random", "iops", "IOPS"), ("sequential", "bw", "KiB/s")):
    ours, theirs = (read(f"{who}-{what}")[key] for who in ("riserd", "kernel"))
    print(f"{what:<10} riserd {ours:9.0f} {unit}, ib_srpt {theirs:9.0f} {unit}: {ours / theirs:.2f}")
P
