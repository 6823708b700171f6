# Functions for cases where riserd is killed while it's used by the kernel's initiators. A case must
# read iscsi.sh first.

# One disk over iSCSI and SRP, with logins by iscsi_tcp and ib_srp. Sets DISKS to the device names.
# Both wait indefinitely if the target is unavailable.
crash_rig() {
    two_hosts
    trap crash_clean EXIT
    serve <<END
backends:
  disk0: { kind: file, path: $IMAGES/disk0.img, size: 1MiB, create: true, write_cache: true, serial: RIG-0 }
targets:
  - name: rig
    iqn: $IQN
    portals:
      - { protocol: iscsi, listen: 10.99.0.2 }
      - { protocol: srp, listen: 10.99.0.2, ioc_guid: 0x$GUID }
    luns: { 0: disk0 }
    access: open
END
    start_iscsid
    iscsi_node
    iscsi_set node.session.timeo.replacement_timeout 3600
    iscsi_login
    load_srp tl_retry_count=2
    wait_for 30 srp_add 10.99.0.2:5555 "$GUID" ch_count=2
    wait_for 60 both_disks
    srp_port fast_io_fail_tmo off
    srp_port dev_loss_tmo off
    srp_port reconnect_delay 1
}

# Returns whether there are two disks, and sets DISKS to their names.
both_disks() {
    local d disks=()
    for d in /sys/class/scsi_device/*:0/device/block/*; do
        [ "$(cat "$d/device/vendor")" = "RISER   " ] && disks+=("/dev/$(basename "$d")")
    done
    DISKS=${disks[*]}
    [ ${#disks[@]} = 2 ]
}

crash_clean() {
    (srp_logout) || true
    modprobe -r ib_srp 2>/dev/null || true
    iscsi_clean
}

# Kills riserd ROUNDS times at random times under a verified load, sometimes again while it is
# starting.
killed_under_load() {
    local round enough=/tmp/enough progress=/tmp/progress before
    rm -f $enough $progress
    RISER_CRASH_DISKS=$DISKS RISER_CRASH_STOP=$enough RISER_CRASH_PROGRESS=$progress \
        "$RISER_TESTS/crash" --ignored --nocapture kernel_disks >"$KEEP/load.log" 2>&1 &
    LOAD=$!
    for ((round = 0; round < ROUNDS; round++)); do
        before=$(cat $progress 2>/dev/null || echo 0)
        going_on() { [ "$(cat $progress)" -gt "$before" ] || is_over $LOAD; }
        wait_for 180 going_on
        ! is_over $LOAD || break
        sleep 0.$((RANDOM % 10))$((RANDOM % 10))
        kill_serving
        if [ $((RANDOM % 4)) = 0 ]; then
            "${PEER[@]}" "$RISER_BIN/riserd" run --config /tmp/riserd.yaml >>"$KEEP/riserd.log" 2>&1 &
            RISERD=$!
            sleep 0.$((RANDOM % 10))$((RANDOM % 10))
            kill_serving
        fi
        serve_again
    done
    touch $enough
    wait $LOAD || {
        tail -20 "$KEEP/load.log"
        fail "the load reported an error in round $round of $ROUNDS"
    }
    echo "result: killed in $round rounds"
    grep '^result: ' "$KEEP/load.log" || fail "the load completed no operations"
}
