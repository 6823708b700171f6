#!/bin/sh
# RUSTC_WORKSPACE_WRAPPER for `cargo xtask fuzz`: runs the compiler, and enables LLVM's coverage counters
# for the fuzzed crates, but not for crates that only contain tests.
case " $* " in
*" --crate-name riser_tests "*)
    # The unit tests of this crate are built, but never run. They are not linked with the fuzzer, which
    # defines the symbols for counters.
    exec "$@" -Clink-arg=-Wl,--unresolved-symbols=ignore-all
    ;;
*" --crate-name fuzz_"* | *" --crate-name riser_test_peers "* | *" --crate-name riser_testkit "*)
    exec "$@"
    ;;
*" --crate-name build_script_"*)
    exec "$@"
    ;;
esac
exec "$@" -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares
