#: group: srp
#: about: verified writes with all I/O schedulers
#: limit: 300
PARAMS=ch_count=4
three_disks_rig
modprobe -a mq-deadline bfq kyber-iosched
queue=/sys/class/block/$(dmsetup info -c --noheadings -o blkdevname paths)/queue/scheduler
for scheduler in none mq-deadline kyber bfq; do
    echo "$scheduler" >"$queue"
    grep -qF "[$scheduler]" "$queue" || fail "scheduler $scheduler is not available"
    verify /dev/mapper/paths 512k --bs=4k --iodepth=64 --iodepth_batch=32
done
