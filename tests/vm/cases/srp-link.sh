#: group: srp
#: about: link down during writes, for less and for more time than the kernel's retries
#: limit: 400
srp_rig 64 1
srp_login ch_count=1 tl_retry_count=2
srp_port fast_io_fail_tmo off
srp_port reconnect_delay 1
load "$DISK" 15
for seconds in 1 20; do
    sleep 3
    far_link down
    sleep $seconds
    far_link up
    sleep 1
    wait_for 60 srp_connected
done
loaded
srp_logout
stop_serving
