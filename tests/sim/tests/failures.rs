//! Each call of an RDMA device that takes memory, and each completion, fails once: of a target with
//! two workers, and of an initiator.
//!
//! Initiators do the same commands again and again; each time another call or completion, by its
//! number, ends with an error. They repeat what was lost, so nothing fails for their users; what is
//! on the disk is explained by what was acknowledged, and in the end no memory, session or object is
//! left at either end.
//!
//! `RISER_ENUMERATE` sets how many of these fail of each kind (default 60, an even sample).

#![allow(missing_docs, reason = "a test")]
#![allow(clippy::print_stdout, reason = "prints figures")]

use std::time::Duration;

use riser_sim::nics::{NicFault, Place, STATUSES};
use riser_sim::plan::{Fault, Protocol, Trouble};
use riser_sim::{Plan, run};
use riser_tests::load::setting;

/// Two initiators at work, while something fails at a device.
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

/// Numbers below `count`, `most` of them at most, evenly.
fn sample(count: usize, most: usize) -> impl Iterator<Item = usize> {
    let taken = count.min(most);
    (0..taken).map(move |at| at * count / taken)
}

/// Fails one after the other; returns the number of runs.
fn enumerate(protocol: Protocol, place: Place) -> usize {
    let most = setting("RISER_ENUMERATE", 60) as usize;
    let none = plan(protocol, place, NicFault::FailCall(usize::MAX));
    let whole = run(&none).unwrap_or_else(|failure| panic!("{failure}"));
    let [calls, completions] = whole.counted;
    assert!(calls > 100 && completions > 50, "{whole:?}");
    let calls = sample(calls, most).map(NicFault::FailCall);
    // Each completion with a status of its own: all statuses come to all kinds of completions.
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
fn each_call_and_completion_of_a_target_fails_once() {
    for protocol in [Protocol::Srp, Protocol::Iser] {
        let runs = enumerate(protocol, Place::Path(0));
        println!("figure: {runs} failures at a target, over {protocol:?}");
    }
}

#[test]
fn each_call_and_completion_of_an_initiator_fails_once() {
    for protocol in [Protocol::Srp, Protocol::Iser] {
        let runs = enumerate(protocol, Place::Initiator(0));
        println!("figure: {runs} failures at an initiator, over {protocol:?}");
    }
}
