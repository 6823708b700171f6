# Functions for all cases, in a guest or here.

# Prints why and ends the case as failed.
fail() {
    echo "FAILED: $*" >&2
    exit 1
}

# Waits until a command succeeds, for this many seconds.
wait_for() {
    local seconds=$1
    shift
    local end=$((SECONDS + seconds))
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $end ] || fail "waited $seconds s for: $*"
        sleep 0.2
    done
}
