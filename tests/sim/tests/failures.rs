//! Fails each allocating call of an RDMA device and each completion once, for a target with two
//! workers and for an initiator.
//!
//! The initiators repeat the same commands, and each time another call or completion fails. They
//! retry lost commands, so their users don't notice any failures. In the end, the data on the disk
//! must match acknowledged writes, and all memory, sessions and objects must be released on both
//! sides.
//!
//! `RISER_ENUMERATE` limits the number of calls and of completions that are tested (default 60,
//! evenly spaced).

#![allow(missing_docs, reason = "a test")]
#![allow(clippy::print_stdout, reason = "prints results")]

use std::time::Duration;

use riser_sim::nics::{NicFault, Place, STATUSES};
use riser_sim::plan::{Fault, Protocol, Trouble};
use riser_sim::{Plan, run};
use riser_tests::load::setting;

/// Creates a plan with two initiators and a device fault.
fn plan(protocol: Protocol, place: Place, fault: NicFault) -> Plan {
    Plan {
        workers: 2,
        initiators: vec![protocol; 2],
        tasks: 2,
        commands: 6,
        troubles: vec![Trouble {
            from: Duration::ZERO,
            until: Duration::from_millis(1),
            fault: Fault::Nic(place, fault),
        }],
        ..Plan::default()
    }
}

/// Returns at most `most` evenly spaced numbers less than `count`.
fn sample(count: usize, most: usize) -> impl Iterator<Item = usize> {
    let taken = count.min(most);
    (0..taken).map(move |at| at * count / taken)
}

/// Runs all faults one by one. Returns the number of runs.
fn enumerate(protocol: Protocol, place: Place) -> usize {
    let most = setting("RISER_ENUMERATE", 60) as usize;
    let none = plan(protocol, place, NicFault::FailCall(usize::MAX));
    let whole = run(&none).unwrap_or_else(|failure| panic!("{failure}"));
    let [calls, completions] = whole.counted;
    assert!(calls > 100 && completions > 50, "{whole:?}");
    let calls = sample(calls, most).map(NicFault::FailCall);
    // Use a different status for each completion, so that all kinds of completions fail with all
    // statuses.
    let completions = sample(completions, most)
        .zip((0..STATUSES.len()).cycle())
        .map(|(number, status)| NicFault::FailCompletion(number, status));
    let mut runs = 0;
    let mut failures = Vec::new();
    for fault in calls.chain(completions) {
        if let Err(failure) = run(&plan(protocol, place, fault)) {
            failures.push(failure.to_string());
        }
        runs += 1;
    }
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
    runs
}

#[test]
fn target_survives_any_failed_call() {
    for protocol in [Protocol::Srp, Protocol::Iser] {
        let runs = enumerate(protocol, Place::Path(0));
        println!("result: {runs} failures at a target, over {protocol:?}");
    }
}

#[test]
fn initiator_survives_any_failed_call() {
    for protocol in [Protocol::Srp, Protocol::Iser] {
        let runs = enumerate(protocol, Place::Initiator(0));
        println!("result: {runs} failures at an initiator, over {protocol:?}");
    }
}
