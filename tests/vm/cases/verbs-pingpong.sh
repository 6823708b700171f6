#: group: verbs
#: about: rdma-core's ping-pongs between rdma_rxe and our libraries, over RC, UC and UD, both roles
#: limit: 240
#: short: yes
. "$RISER_ROOT/tests/vm/verbs.sh"
two_hosts
trap one_host EXIT
GID=$(gid_index rxe0 10.99.0.1)
# rdma_rxe has no XRC, so ibv_xsrq_pingpong has no peer here.
for run in "rc -c -e -n 50" "rc -c -s 65536 -m 4096 -n 20" "uc -c -n 50" "ud -c -s 1024 -n 50" \
    "srq -c -q 2 -n 50"; do
    program="ibv_${run%% *}_pingpong" options=${run#* }
    both "$program $options" listen ends "$program {sdev} -g {sgid} -p {port} $options" \
        "$program {cdev} -g {cgid} -p {port} $options {server}" "usec/iter"
done
all_passed
nothing_left
