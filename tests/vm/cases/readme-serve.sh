#: group: srp
#: about: the book: serve to a Linux host, as documented
#: limit: 200
#: short: yes
two_hosts
trap srp_clean EXIT
rdma link delete rxe0
cd /tmp
book initiators "Linux: SRP" yaml >/tmp/readme.yaml
cat /tmp/readme.yaml
"$RISER_BIN/riserd" check /tmp/readme.yaml
serve </tmp/readme.yaml
book initiators "Linux: SRP" sh | typed
wait_for 30 find_disk 0
[ "$(blockdev --getsize64 "$DISK")" = $((1 << 30)) ] || fail "unexpected size"
verify "$DISK" 4m --bs=64k
echo 1 >/sys/class/srp_remote_ports/port-*/delete
wait_for 30 no_hosts
stop_serving
