#: group: srp
#: about: riserd is killed and restarted during writes; the kernel reconnects and no data is lost
#: limit: 400
srp_rig 64 1
srp_login ch_count=2 tl_retry_count=2
srp_port fast_io_fail_tmo off
srp_port reconnect_delay 1
load "$DISK" 16
for i in 1 2; do
    sleep 4
    kill_serving
    sleep 1
    serve_again
    wait_for 60 srp_connected
done
loaded
wait_for 60 srp_connected
srp_logout
stop_serving
