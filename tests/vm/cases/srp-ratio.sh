#: group: srp
#: about: riserd on rdma_core compared to the kernel's ib_srpt: correctness and performance for the same file
#: limit: 600
#: alone: yes
#: packets: none
dummy_host
trap ratio_clean EXIT
ratio_clean() {
    (srp_logout) || true
    kernel_target_clean
    dummy_clean
}
kernel_target
head -c 96M /dev/urandom >"$IMAGES/srpt.img"
serve <<Y
backends:
  disk0: { kind: file, path: $IMAGES/srpt.img, serial: RIG-0 }
targets:
  - name: rig
    portals: [{ protocol: srp, listen: "10.99.0.2:5556", ioc_guid: 0x$GUID }]
    luns: { 0: disk0 }
    access: open
transport: { provider: rdma_core }
Y
load_srp
wait_for 30 srp_add 10.99.0.2:5556 "$GUID" ch_count=2
wait_for 30 srp_add 10.99.0.1:5555 "$G" ch_count=2

# Finds the disk with this vendor name.
disk_of() {
    local d
    for d in /sys/class/scsi_device/*:0/device/block/*; do
        [ "$(cat "$d/device/vendor" 2>/dev/null)" = "$1" ] && echo "/dev/$(basename "$d")" && return
    done
    return 1
}
wait_for 60 disk_of "RISER   "
wait_for 60 disk_of "LIO-ORG "
for vendor in "RISER   " "LIO-ORG "; do
    cmp "$(disk_of "$vendor")" "$IMAGES/srpt.img" || fail "the data of $vendor differ from the file"
done

measure() { # name, disk
    local options=(--filename="$2" --size=96m --direct=1 --ioengine=libaio --time_based --output-format=json)
    fio --name=random --rw=randread --bs=4k --iodepth=16 --runtime=8 --ramp_time=2 "${options[@]}" >"$KEEP/$1-random.json"
    fio --name=sequential --rw=read --bs=128k --iodepth=8 --runtime=8 --ramp_time=2 "${options[@]}" >"$KEEP/$1-sequential.json"
}
# Alternate between both targets, because the speed of the machine may change.
for round in 1 2 3; do
    measure riserd-$round "$(disk_of "RISER   ")"
    measure kernel-$round "$(disk_of "LIO-ORG ")"
done
srp_logout
stop_serving
python3 - "$KEEP" <<'P'
import json, sys
def mean(who, what, key):
    total = 0
    for n in (1, 2, 3):
        with open(f"{sys.argv[1]}/{who}-{n}-{what}.json") as f:
            text = f.read()
        job = json.loads(text[text.index("{"):])["jobs"][0]
        if job["error"] or not job["read"]["total_ios"]:
            sys.exit(f"{who}, round {n}: error {job['error']}, {job['read']['total_ios']} reads")
        total += job["read"][key]
    return total / 3
for what, key, unit in (("4 KiB random reads at depth 16", "iops", "IOPS"), ("128 KiB sequential reads", "bw", "KiB/s")):
    ours, theirs = mean("riserd", what.split()[2], key), mean("kernel", what.split()[2], key)
    print(f"result: {what}: riserd on rdma_core {ours:.0f} {unit}, ib_srpt {theirs:.0f} {unit}, ratio {ours / theirs:.2f}")
P
