# Functions for all cases, in a guest or on this machine.

# Prints an error and fails the case.
fail() {
    echo "FAILED: $*" >&2
    exit 1
}

# Waits up to this number of seconds until a command succeeds.
wait_for() {
    local seconds=$1
    shift
    local end=$((SECONDS + seconds))
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $end ] || fail "timed out after $seconds s: $*"
        sleep 0.2
    done
}
