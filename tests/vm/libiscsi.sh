# Runs the libiscsi suite over iSER, with a separate process for each test, because the client fails
# or crashes in some of them. A case creates a target, calls `libiscsi_suite URL`, and then uses
# `libiscsi_unexpected` or `libiscsi_not_the_client` to check the results.

# Tests that cannot pass over iSER because of the client, with their results and output.
: "${EXPECTED:=$RISER_ROOT/tests/vm/libiscsi-iser.txt}"
# Directory for the results: `ended` contains a line "HOW NAME" for each test, and `said/` contains
# the output of each test.
: "${OUTCOME:=/tmp/libiscsi}"

# With iSER, the client adds the data buffer of a failed command to its cache of PDU headers, even
# if it is too small, and then crashes when it uses this buffer as a header. This can be avoided by
# disabling the cache.
export LIBISCSI_CACHE_ALLOCATIONS=0

# Runs all tests (or those that match ONLY) with a timeout of LIMIT seconds, and prints a summary.
# The output is kept for all tests except those that passed. If five tests in a row get no response,
# the remaining tests are skipped, and a line "stopped" is added to `ended`. A case may define
# `client_died` to clean up after a client that crashed or hung during a test.
libiscsi_suite() {
    local url=$1 test name status how unanswered=0
    rm -rf "$OUTCOME"
    mkdir -p "$OUTCOME/said"
    : >"$OUTCOME/ended"
    cc -shared -fPIC -o "$OUTCOME/client.so" "$RISER_ROOT/tests/vm/libiscsi.c" -ldl
    tests=$(iscsi-test-cu -l | grep -oE '^ALL\.[A-Za-z0-9]+\.[A-Za-z0-9]+' | sort -u | grep -E "${ONLY:-.}")
    died=$(libiscsi_expected | awk '$1 == "died" { print "ALL." $2 }') || true
    for test in $(grep -vxF "$died" <<<"$tests") $(grep -xF "$died" <<<"$tests"); do
        name=${test#ALL.}
        status=0
        timeout -k 1 "${LIMIT:-240}" env LD_PRELOAD="$OUTCOME/client.so" iscsi-test-cu -d -t "$test" "$url" \
            >"$OUTCOME/said/$name" 2>&1 || status=$?
        how=$(libiscsi_verdict $status "$OUTCOME/said/$name")
        echo "$how $name" | tee -a "$OUTCOME/ended"
        if [ "$how" != passed ]; then
            { echo "=== $how, exit status $status: $test"; tail -n 60 "$OUTCOME/said/$name"; echo; } >>"$KEEP/suite.log"
        fi
        # It reached the timeout, or could not log in.
        if [ "$how" = hung ] || [ $status = 255 ]; then unanswered=$((unanswered + 1)); else unanswered=0; fi
        if [ $unanswered = 5 ]; then
            echo "stopped" >>"$OUTCOME/ended"
            break
        fi
        case $status in
        124 | 1[3-9][0-9]) if declare -F client_died >/dev/null; then client_died; fi ;;
        esac
    done
    echo "result: $(libiscsi_count passed) passed, $(libiscsi_count failed) failed," \
        "$(libiscsi_count skipped) skipped, in $(libiscsi_count died) the client died, in" \
        "$(libiscsi_count hung) it hung"
}

# Prints the result of a test based on the client's exit status and output: libiscsi_verdict STATUS
# FILE. The output has precedence: if a test reports a failure, or reports a problem and then
# doesn't complete, it has failed, even if the client was killed by a signal or hangs.
libiscsi_verdict() {
    # Messages of CUnit, which may be followed by other output at the end of the suite. Messages of
    # tests use brackets.
    local failed='(^|\.\.\.)FAILED$' passed='(^|\.\.\.)passed|passed *$'
    if grep -qE "$failed" "$2" || { ! grep -qE "$passed" "$2" && grep -qF '[FAILED]' "$2"; }; then
        echo failed
    elif [ "$1" = 124 ] || [ "$1" = 137 ]; then
        # Either the timeout, or SIGKILL if the client did not exit after the timeout.
        echo hung
    elif [ "$1" -gt 128 ] && [ "$1" -lt 255 ]; then
        echo died
    elif ! grep -qE "$passed" "$2"; then
        echo failed
    elif grep -qF '[SKIPPED]' "$2"; then
        echo skipped
    else
        echo passed
    fi
}

# Prints the number of tests with this result.
libiscsi_count() {
    grep -c "^$1 " "$OUTCOME/ended" || true
}

# Prints the expected results of the selected tests, in lines with "HOW NAME WORDS …".
libiscsi_expected() {
    grep -vE '^(#|$)' "$EXPECTED" | grep -E "^[a-z]+ +[^ ]*(${ONLY:-.})"
}

# Prints a line for each unexpected result: libiscsi_unexpected LEAST, where LEAST is the minimum
# number of tests that must pass. This includes tests with a different result than listed, listed
# tests without the listed output, and listed tests that don't exist any more.
libiscsi_unexpected() {
    local how name words listed
    if grep -qx stopped "$OUTCOME/ended"; then echo "five tests in a row received no response"; fi
    if [ "$(libiscsi_count passed)" -lt "$1" ]; then
        echo "$(libiscsi_count passed) tests passed, fewer than $1"
    fi
    while read -r how name; do
        case $how in
        failed | died | hung)
            listed=$(libiscsi_expected | awk -v name="$name" '$2 == name { print $1 }')
            [ -n "$listed" ] || echo "$name $how, but is not listed"
            ;;
        esac
    done <"$OUTCOME/ended"
    while read -r how name words; do
        listed=$(awk -v name="$name" '$2 == name { print $1 }' "$OUTCOME/ended")
        if [ "$listed" != "$how" ]; then
            echo "$name is listed as $how, result: ${listed:-not run}"
        elif [ -n "$words" ] && ! grep -qF -- "$words" "$OUTCOME/said/$name"; then
            echo "$name $how, but its output does not contain: $words"
        fi
    done < <(libiscsi_expected)
}

# Prints listed tests that pass with another target, because then the reason is not in the client,
# and listed tests that did not run, because then the reason is unknown. Tests where the client
# crashes don't need to run after the target has stopped responding: they are last, so one of them
# was the reason.
libiscsi_not_the_client() {
    local how name words here
    while read -r how name words; do
        here=$(awk -v name="$name" '$2 == name { print $1 }' "$OUTCOME/ended")
        case $here in
        passed) echo "$name is listed as $how, but passed" ;;
        "")
            if [ "$how" != died ] || ! grep -qx stopped "$OUTCOME/ended"; then
                echo "$name is listed as $how, but was not run"
            fi
            ;;
        esac
    done < <(libiscsi_expected)
}
