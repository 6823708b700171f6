#: group: srp
#: about: verified writes under every I/O scheduler
#: limit: 300
PARAMS=ch_count=4
blktests_rig
modprobe -a mq-deadline bfq kyber-iosched 2>/dev/null || true
queue=/sys/class/block/$(basename "$(readlink -f /dev/mapper/paths)")/queue/scheduler
for scheduler in $(tr -d '[]' <"$queue"); do
    echo "$scheduler" >"$queue"
    grep -qF "[$scheduler]" "$queue" || fail "no scheduler $scheduler"
    verify /dev/mapper/paths 512k --bs=4k --iodepth=64 --iodepth_batch=32
done
