# libiscsi's suite over iSER, one process per test, because the client itself dies in some. A case
# makes a target, then calls `libiscsi_suite URL`.

# What fails over iSER for the client's own reasons, by its source. Over iSER
# - it takes the length that it has asked for as the length that came;
CLIENT_FAILS="Inquiry.AllocLength Inquiry.BlockLimits ModeSense6.Residuals"
# - it does not end a connection where a test wants one to be lost;
CLIENT_FAILS+=" Reserve6.ITNexusLoss"
# - it sends no write that has no data;
CLIENT_FAILS+=" iSCSIResiduals.WriteVerify10Residuals iSCSIResiduals.WriteVerify12Residuals"
CLIENT_FAILS+=" iSCSIResiduals.WriteVerify16Residuals"
# - it takes the silence that these want for a broken connection;
CLIENT_FAILS+=" iSCSIcmdsn.iSCSICmdSnTooHigh iSCSIcmdsn.iSCSICmdSnTooLow"
# - it sends Data-Out PDUs, which iSER does not have, and without their data.
CLIENT_FAILS+=" iSCSIdatasn.iSCSIDataSnInvalid"

# Over iSER the client puts the data buffer of a command that has failed, however small, among its spare
# PDU headers, and dies when it uses it as one. It does not if it keeps none.
export LIBISCSI_CACHE_ALLOCATIONS=0

# Runs every test with a time limit; a name per line goes to /tmp/suite-passed, -failed, -skipped and
# -crashed, and a figure is printed. What failing tests said is kept. When five in a row have had no
# answer, the rest is left out, which /tmp/suite-stopped tells. A case may define `client_died`, to do
# away with what a client has left behind that died in a test.
libiscsi_suite() {
    local url=$1 test status how unanswered=0
    cc -shared -fPIC -o /tmp/libiscsi-keeps.so "$RISER_ROOT/tests/vm/libiscsi.c"
    rm -f /tmp/suite-*
    touch /tmp/suite-{passed,failed,skipped,crashed}
    for test in $(iscsi-test-cu -l | grep -oE '^ALL\.[A-Za-z0-9]+\.[A-Za-z0-9]+' | sort -u | grep -E "${ONLY:-.}"); do
        status=0
        timeout -k 1 ${LIMIT:-30} env LD_PRELOAD=/tmp/libiscsi-keeps.so iscsi-test-cu -d -t "$test" "$url" >/tmp/said 2>&1 || status=$?
        how=$(libiscsi_verdict $status)
        echo "${test#ALL.}" >>/tmp/suite-"$how"
        echo "$how ${test#ALL.}"
        case $how in
        failed | crashed) { echo "=== $how $status $test"; tail -n 60 /tmp/said; } >>"$KEEP/suite.log" ;;
        esac
        case $status in
        # It hung until it was ended, or killed; it could not log in.
        124 | 137 | 255) unanswered=$((unanswered + 1)) ;;
        *) unanswered=0 ;;
        esac
        if [ $unanswered = 5 ]; then
            echo "figure: no answer any more, from ${test#ALL.} on"
            touch /tmp/suite-stopped
            break
        fi
        if [ $how = crashed ] && declare -F client_died >/dev/null; then client_died; fi
    done
    echo "figure: $(libiscsi_count passed) passed, $(libiscsi_count failed) failed," \
        "$(libiscsi_count skipped) skipped, in $(libiscsi_count crashed) the client died or hung"
}

# What came of a test, by the client's exit status and what it said.
libiscsi_verdict() {
    # A signal, or the time limit; it exits with 255 itself where it cannot log in.
    if [ "$1" -ge 124 ] && [ "$1" -lt 255 ]; then
        echo crashed
    elif grep -qE '(^|\.\.\.)FAILED$' /tmp/said; then
        echo failed
    elif grep -qF '[SKIPPED]' /tmp/said; then
        echo skipped
    elif grep -qE 'passed *$' /tmp/said; then
        echo passed
    else
        echo failed
    fi
}

libiscsi_count() {
    wc -l <"/tmp/suite-$1"
}

# Tests that failed and are not the client's own failures.
libiscsi_failures() {
    printf '%s\n' $CLIENT_FAILS | grep -vxFf - /tmp/suite-failed || true
}
