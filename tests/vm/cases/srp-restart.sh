#: group: srp
#: about: riserd ended and started again in good order while writes run
#: limit: 400
srp_rig 64 1
srp_login ch_count=2
srp_port fast_io_fail_tmo off
srp_port reconnect_delay 1
load "$DISK" 16
for i in 1 2; do
    sleep 4
    stop_serving
    sleep 1
    serve_again
    wait_for 60 srp_connected
done
loaded
srp_logout
stop_serving
