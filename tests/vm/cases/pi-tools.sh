#: group: pi
#: about: sg3-utils and ddpt with protection information: the same results with riserd and scsi_debug
#: limit: 1200
OVER=iscsi
. /vm/pi.sh
pi_rig "owner: client"
debug_disk 1 512
echo 1 >/proc/sys/kernel/printk
THEIRS=$(generic Linux 0)
OURS=$(generic RISER "$(pi_lun 1 512)")

# Runs a program on one of the disks: on DISK FILTER COMMAND …, where @ is the disk.
on() {
    local disk=$1 filter=$2 status=0
    shift 2
    rm -f /tmp/read
    "${@//@/$disk}" >/tmp/said 2>&1 || status=$?
    echo "exit status $status"
    sed "s|$disk|DISK|g" /tmp/said | grep -E "$filter" || true
}

# Runs a program on both disks. It must exit with a status, and the lines that match a filter must be equal:
# both STATUS FILTER COMMAND …
both() {
    local wanted=$1
    shift
    on "$THEIRS" "$@" >/tmp/theirs
    on "$OURS" "$@" >/tmp/ours
    echo "--- ${*:2}"
    cat /tmp/ours
    diff /tmp/theirs /tmp/ours || fail "different results: ${*:2}"
    grep -q "^exit status $wanted$" /tmp/ours || fail "not exit status $wanted: ${*:2}"
}

# Blocks with valid and with wrong tuples.
python3 - <<PY
import sys
sys.path.insert(0, "$RISER_ROOT/tests/vm")
sys.dont_write_bytecode = True
import pi
blocks = pi.make_blocks(512, 16, 5)
for name, wrong in (("valid", 0), ("wrong", 1)):
    tuples = [pi.tuple_of(block, reference=64 + i, wrong=wrong) for i, block in enumerate(blocks)]
    open(f"/tmp/{name}", "wb").write(pi.join(blocks, tuples))
zeros = bytes(512)
open("/tmp/same", "wb").write(zeros + pi.tuple_of(zeros, reference=128))
PY

both 0 'Protection|Last LBA|block length' sg_readcap -l @
both 0 '[Pp]rotect=' sg_inq @
both 0 'GRD_CHK|APP_CHK|REF_CHK' sg_vpd -p ei -l @

# Tuples received, checked and returned.
both 0 'records|error' ddpt if=/tmp/valid of=@ bs=512 seek=64 count=16 protect=0,1
for protect in 1 2 3 4 5; do
    both 0 'records|error' ddpt if=@ of=/tmp/read bs=512 skip=64 count=16 protect=$protect
    cmp /tmp/valid /tmp/read
done
both 0 'records|error' ddpt if=@ of=/tmp/read bs=512 skip=64 count=16
cmp <(python3 -c 'import sys; d = open("/tmp/valid", "rb").read(); sys.stdout.buffer.write(b"".join(d[i:i+512] for i in range(0, len(d), 520)))') /tmp/read

SENSE='Status|Sense key|sense:'
write16="8a 20 00 00 00 00 00 00 00 40 00 00 00 10 00 00"
both 0 "$SENSE" sg_raw -s 8320 -i /tmp/valid @ $write16
both 40 "$SENSE" sg_raw -s 8320 -i /tmp/wrong @ $write16
both 0 "$SENSE" sg_raw -s 8320 -i /tmp/wrong @ ${write16/8a 20/8a 60}
both 40 "$SENSE" sg_raw -r 8320 -o /tmp/read @ ${write16/8a 20/88 20}
both 0 "$SENSE" sg_raw -r 8320 -o /tmp/read @ ${write16/8a 20/88 60}
cmp /tmp/wrong /tmp/read

both 0 . sg_verify -P 3 -l 64 -c 16 @
both 0 . sg_write_same --16 --lba=128 --num=1 --wrprotect=1 --xferlen=520 --in=/tmp/same @
both 0 exit sg_unmap --force --lba=64 --num=16 @
both 0 'records|error' ddpt if=@ of=/tmp/read bs=512 skip=64 count=16 protect=3
python3 -c 'import sys; sys.exit(open("/tmp/read", "rb").read() != (bytes(512) + b"\xff" * 8) * 16)'
both 0 'records|error' ddpt if=@ of=/tmp/read bs=512 skip=64 count=16 protect=1
