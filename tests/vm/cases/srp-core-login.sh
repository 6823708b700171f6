#: group: srp
#: about: riserd on rdma_core: login with one and four channels, capacity, identity, list of devices
#: limit: 300
CORE=yes
. "$RISER_ROOT/tests/vm/cases/srp-login.sh"
"$RISER_BIN/riserd" devices | tee /dev/stderr | grep -q 'rdma_core: rxe1 at .*10.99.0.2' || fail "the device is not listed"
