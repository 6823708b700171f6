//! Runs the provider suite on devices that may or may not be present, and tests that require such
//! devices.
//!
//! With a device of the provider `iwarp`, only the part of the suite that iWARP supports is run.
//!
//! `RISER_SUITE` selects two devices, `PROVIDER:ADDRESS` or `PROVIDER:ADDRESS@NAMESPACE` each; the
//! first connects, the second listens:
//!
//! ```text
//! RISER_SUITE="rdma_core:10.99.0.1 roce:10.99.0.2,10.99.1.2@peer" devices [WORD…]
//! ```
//!
//! Our devices may have additional addresses after the first; a host device has the addresses of
//! its GID table.
//!
//! Words select the tests whose names contain one of them. Without words, the suite is run; the
//! tests of the module `stress` are only run if they are selected. They use additional environment
//! variables:
//!
//! | variable | meaning |
//! | --- | --- |
//! | `RISER_LENGTH` | the maximum message length of `stress::sizes`, in bytes |
//! | `RISER_MTU` | the path MTU that `stress::sizes` must find |
//! | `RISER_CUT` | a command that disconnects the peer |
//! | `RISER_HEAL` | a command that reconnects it |
//!
//! The tests run sequentially, because they share their addresses. `cargo xtask interop` runs them
//! between the software NIC and a Linux kernel. If no devices are selected, this program does
//! nothing.

#![allow(clippy::print_stdout, reason = "the output is the report")]

mod suite;
mod with_kernel;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use with_kernel::{Devices, stress};

type Test = (&'static str, fn(Devices));

/// Timeout for each test, which allows for an emulated kernel and a network that loses every tenth
/// packet.
const LIMIT: Duration = Duration::from_secs(900);

/// Callback of `suite_names` that generates the table of the suite.
#[macro_export]
macro_rules! suite_table {
    (() $($module:ident: $($name:ident)*;)*) => {
        vec![$($((
            concat!(stringify!($module), "::", stringify!($name)),
            $crate::suite::$module::$name::<$crate::with_kernel::Devices> as fn(_),
        ),)*)*]
    };
}

fn main() -> ExitCode {
    let Ok(spec) = std::env::var("RISER_SUITE") else {
        // This is the output format of Rust's test harness, which `cargo xtask test` parses.
        println!("RISER_SUITE names no devices\ntest result: ok. 0 passed; 0 failed;");
        return ExitCode::SUCCESS;
    };
    let words: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| !a.starts_with('-'))
        .collect();
    let mut tests: Vec<Test> = if spec.contains("iwarp:") {
        crate::stream_names! { suite_table, () }
    } else {
        crate::suite_names! { suite_table, () }
    };
    if !spec.contains("iwarp:") {
        tests.extend(crate::hand_made_names! { suite_table, () });
        tests.extend(crate::two_address_names! { suite_table, () });
    }
    let stress = stress::TESTS.iter().copied();
    let is_named = |t: &Test| words.iter().any(|w| t.0.contains(w.as_str()));
    let chosen: Vec<Test> = if words.is_empty() {
        tests
    } else {
        tests.into_iter().chain(stress).filter(is_named).collect()
    };
    let (mut passed, mut failed) = (0, 0);
    for (name, test) in chosen {
        let started = Instant::now();
        let ok = watched(name, || test(Devices::open(&spec)));
        println!(
            "{} {name} ({:.1} s)",
            if ok { "ok    " } else { "FAILED" },
            started.elapsed().as_secs_f64()
        );
        if ok {
            passed += 1;
        } else {
            failed += 1;
        }
    }
    println!("{spec}: {passed} passed, {failed} failed");
    if failed == 0 && passed > 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Runs a test, and terminates the whole program if it hangs.
fn watched(name: &'static str, test: impl FnOnce()) -> bool {
    let (done, waiting) = channel::<()>();
    std::thread::spawn(move || {
        if waiting.recv_timeout(LIMIT) == Err(RecvTimeoutError::Timeout) {
            println!("FAILED {name}: hangs");
            std::process::exit(3);
        }
    });
    let ok = catch_unwind(AssertUnwindSafe(test)).is_ok();
    drop(done);
    ok
}
