# libiscsi's suite over iSER, one process per test, because the client itself dies in some. A case
# makes a target, then calls `libiscsi_suite URL`.

# Runs every test with a time limit. Counts into PASSED, FAILED, SKIPPED and CRASHED, a name per line
# in /tmp/suite-…, and prints a figure. What failing tests said is kept.
libiscsi_suite() {
    local url=$1 test status how
    rm -f /tmp/suite-*
    touch /tmp/suite-{passed,failed,skipped,crashed}
    for test in $(iscsi-test-cu -l | grep -oE '^ALL\.[A-Za-z0-9]+\.[A-Za-z0-9]+' | sort -u | grep -E "${ONLY:-.}"); do
        status=0
        timeout -k 1 30 iscsi-test-cu -d -t "$test" "$url" >/tmp/said 2>&1 || status=$?
        how=$(libiscsi_verdict $status)
        echo "${test#ALL.}" >>/tmp/suite-"$how"
        echo "$how ${test#ALL.}"
        case $how in
        failed | crashed) { echo "=== $how $status $test"; tail -n 60 /tmp/said; } >>"$KEEP/suite.log" ;;
        esac
    done
    echo "figure: $(libiscsi_count passed) passed, $(libiscsi_count failed) failed," \
        "$(libiscsi_count skipped) skipped, in $(libiscsi_count crashed) the client died or hung"
}

# What came of a test, by the client's exit status and what it said.
libiscsi_verdict() {
    # A signal, or the time limit.
    if [ "$1" -ge 124 ]; then
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
