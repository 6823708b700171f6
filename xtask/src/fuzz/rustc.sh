#!/bin/sh
# Cargo's RUSTC_WORKSPACE_WRAPPER for `cargo xtask fuzz`: the compiler, with LLVM's coverage counters
# in the crates that are fuzzed, and not in those that only test them.
case " $* " in
*" --crate-name riser_tests "*)
    # Its unit tests are built with the others and never run: they have no fuzzer, which would have
    # what counters need.
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
