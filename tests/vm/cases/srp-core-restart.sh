#: group: srp
#: about: riserd on rdma_core killed, and ended in good order, and started again while writes run
#: limit: 400
core_rig
srp_login ch_count=2 tl_retry_count=2
srp_port fast_io_fail_tmo off
srp_port reconnect_delay 1
load "$DISK" 16
sleep 3
kill_serving
sleep 1
core_serve
wait_for 60 srp_connected
sleep 4
stop_serving
sleep 1
core_serve
wait_for 60 srp_connected
loaded
srp_logout
stop_serving
