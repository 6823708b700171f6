# libiscsi's suite over iSER, one process per test, because the client itself fails and dies in some. A
# case makes a target, calls `libiscsi_suite URL`, and then asks `libiscsi_unexpected` or
# `libiscsi_not_the_client` what is wrong with the outcome.

# Which tests cannot pass over iSER for the client's own reasons, how each ends and what it says.
: "${EXPECTED:=$RISER_ROOT/tests/vm/libiscsi-iser.txt}"
# Where the outcome goes: a line "HOW NAME" per test in `ended`, and what each test printed in `said/`.
: "${OUTCOME:=/tmp/libiscsi}"

# Over iSER the client puts the data buffer of a command that has failed, however small, among its spare
# PDU headers, and dies when it uses it as one. It does not if it keeps none.
export LIBISCSI_CACHE_ALLOCATIONS=0

# Runs every test, or those that ONLY matches, each for LIMIT seconds at most, and prints a figure. What
# all but the passed ones said is kept. When five in a row have had no answer, the rest is left out, and
# `ended` has the line "stopped". A case may define `client_died`, to do away with what a client has left
# behind that died or hung in a test.
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
        # It had to be ended, or could not log in.
        if [ "$how" = hung ] || [ $status = 255 ]; then unanswered=$((unanswered + 1)); else unanswered=0; fi
        if [ $unanswered = 5 ]; then
            echo "stopped" >>"$OUTCOME/ended"
            break
        fi
        case $status in
        124 | 1[3-9][0-9]) if declare -F client_died >/dev/null; then client_died; fi ;;
        esac
    done
    echo "figure: $(libiscsi_count passed) passed, $(libiscsi_count failed) failed," \
        "$(libiscsi_count skipped) skipped, in $(libiscsi_count died) the client died, in" \
        "$(libiscsi_count hung) it hung"
}

# What came of a test: libiscsi_verdict STATUS FILE, the client's exit status and what it printed. What it
# printed counts first: a test that says that it has failed, or sees something wrong and then does not
# come to its end, has failed, also if the client dies of a signal or hangs.
libiscsi_verdict() {
    # CUnit's own words, behind which the end of the suite may print more; tests print theirs in brackets.
    local failed='(^|\.\.\.)FAILED$' passed='(^|\.\.\.)passed|passed *$'
    if grep -qE "$failed" "$2" || { ! grep -qE "$passed" "$2" && grep -qF '[FAILED]' "$2"; }; then
        echo failed
    elif [ "$1" = 124 ] || [ "$1" = 137 ]; then
        # The time limit, or the kill that follows if the client does not end by it.
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

# How many tests ended in a way.
libiscsi_count() {
    grep -c "^$1 " "$OUTCOME/ended" || true
}

# The list of what is expected, a line "HOW NAME WORDS …" each, of the tests that are run.
libiscsi_expected() {
    grep -vE '^(#|$)' "$EXPECTED" | grep -E "^[a-z]+ +[^ ]*(${ONLY:-.})"
}

# A line for everything that is not as expected: libiscsi_unexpected LEAST, the number of tests that must
# pass. Tests that end otherwise than listed, or listed ones that do not say what they are listed with,
# are named; so are tests of the list that are gone.
libiscsi_unexpected() {
    local how name words listed
    if grep -qx stopped "$OUTCOME/ended"; then echo "five tests in a row had no answer"; fi
    if [ "$(libiscsi_count passed)" -lt "$1" ]; then
        echo "$(libiscsi_count passed) tests passed, fewer than $1"
    fi
    while read -r how name; do
        case $how in
        failed | died | hung)
            listed=$(libiscsi_expected | awk -v name="$name" '$2 == name { print $1 }')
            [ -n "$listed" ] || echo "$name $how, and is not listed"
            ;;
        esac
    done <"$OUTCOME/ended"
    while read -r how name words; do
        listed=$(awk -v name="$name" '$2 == name { print $1 }' "$OUTCOME/ended")
        if [ "$listed" != "$how" ]; then
            echo "$name is listed as $how, and was ${listed:-not run}"
        elif [ -n "$words" ] && ! grep -qF -- "$words" "$OUTCOME/said/$name"; then
            echo "$name $how, but did not say: $words"
        fi
    done < <(libiscsi_expected)
}

# Tests of the list that pass with another target, so that the reason is not the client's, and those that
# did not run there, so that nothing is known of the reason. Those in which the client dies need not all have
# run where the target stopped answering: that they come last makes sure that it was one of them.
libiscsi_not_the_client() {
    local how name words here
    while read -r how name words; do
        here=$(awk -v name="$name" '$2 == name { print $1 }' "$OUTCOME/ended")
        case $here in
        passed) echo "$name is listed as $how, and passed here" ;;
        "")
            if [ "$how" != died ] || ! grep -qx stopped "$OUTCOME/ended"; then
                echo "$name is listed as $how, and was not run here"
            fi
            ;;
        esac
    done < <(libiscsi_expected)
}
