//! Single faults of a foreign target with one and two paths.

use std::time::Duration;

use riser_sim::foreign::{ForeignFault, Lack, Traits};
use riser_sim::plan::{Fault, Plan, Protocol, Trouble};
use riser_sim::run;

const PROTOCOLS: [Protocol; 3] = [Protocol::Iscsi, Protocol::Iser, Protocol::Srp];

/// Runs an initiator on a foreign target over each protocol, with several seeds. The fault occurs
/// twice.
fn pass(traits: &Traits, paths: usize, fault: Option<ForeignFault>) {
    for protocol in PROTOCOLS {
        pass_with(protocol, traits, paths, fault);
    }
}

/// Runs three seeds of an initiator on a foreign target. The fault occurs twice.
fn pass_with(protocol: Protocol, traits: &Traits, paths: usize, fault: Option<ForeignFault>) {
    let trouble = |from, fault| Trouble {
        from: Duration::from_secs(from),
        until: Duration::from_millis(from * 1000 + 1500),
        fault: Fault::Foreign(fault),
    };
    let troubles = fault.map_or(vec![], |fault| vec![trouble(2, fault), trouble(20, fault)]);
    for seed in 1..=3 {
        let plan = Plan {
            seed,
            foreign: Some(traits.clone()),
            initiators: vec![protocol],
            paths,
            tasks: 3,
            commands: 40,
            troubles: troubles.clone(),
            ..Plan::default()
        };
        if let Err(failure) = run(&plan) {
            panic!("{failure}");
        }
    }
}

fn slow() -> Traits {
    Traits {
        slowest: Duration::from_secs(10),
        ..Traits::default()
    }
}

#[test]
fn unit_without_dpofua_stores_fua_writes() {
    let traits = Traits {
        dpofua: false,
        ..Traits::default()
    };
    pass(&traits, 1, None);
}

#[test]
fn unit_without_long_cdbs_is_usable() {
    let traits = Traits {
        lacks: vec![Lack::ReadCapacity16, Lack::LongCdbs, Lack::ReportLuns],
        ..Traits::default()
    };
    pass(&traits, 1, None);
}

#[test]
fn solicited_writes_reach_medium() {
    let traits = Traits {
        initial_r2t: true,
        first_burst: 512,
        ..Traits::default()
    };
    pass(&traits, 1, None);
}

#[test]
fn returning_path_keeps_cache() {
    for fault in [ForeignFault::StopPortal(0), ForeignFault::HangPortal(0)] {
        pass(&Traits::default(), 2, Some(fault));
    }
}

#[test]
fn late_write_never_overwrites_newer_data() {
    for (paths, fault) in [
        (1, ForeignFault::StopPortal(0)),
        (2, ForeignFault::StopPortal(0)),
        (2, ForeignFault::HangPortal(0)),
    ] {
        pass(&slow(), paths, Some(fault));
    }
}

#[test]
fn late_write_never_follows_redirection() {
    for protocol in [Protocol::Iscsi, Protocol::Iser] {
        for same_group in [false, true] {
            let traits = Traits {
                same_group,
                ..slow()
            };
            pass_with(protocol, &traits, 1, Some(ForeignFault::Redirect));
        }
    }
}

#[test]
fn login_waits_for_default_time2wait() {
    let traits = Traits {
        time2wait: 5,
        ..Traits::default()
    };
    for fault in [ForeignFault::StopPortal(0), ForeignFault::LosePower] {
        pass(&traits, 1, Some(fault));
    }
}

#[test]
fn damaged_immediate_data_are_sent_again() {
    let fault = ForeignFault::DamageData(0.5);
    pass_with(Protocol::Iscsi, &Traits::default(), 1, Some(fault));
}

#[test]
fn transient_responses_fail_no_request() {
    for fault in [
        ForeignFault::RecoverErrors(1.0),
        ForeignFault::FailResponses(0.2),
        ForeignFault::NotReady(0x01),
        ForeignFault::NotReady(0x07),
        ForeignFault::NotReady(0x14),
        ForeignFault::ReturnStatus(0x08, 0.5),
        ForeignFault::ReturnStatus(0x28, 0.5),
    ] {
        pass(&Traits::default(), 1, Some(fault));
    }
}

#[test]
fn flush_reports_lost_cache() {
    for paths in [1, 2] {
        for fault in [ForeignFault::LoseCache, ForeignFault::LosePower] {
            pass(&Traits::default(), paths, Some(fault));
        }
    }
}

#[test]
fn restarted_node_keeps_cache_of_another() {
    let traits = Traits {
        reports_restarts: true,
        ..Traits::default()
    };
    pass(&traits, 2, Some(ForeignFault::StopPortal(0)));
}

/// The path in use is too busy for another command when the other path returns.
#[test]
fn restarted_node_keeps_cache_of_busy_path() {
    let traits = Traits {
        reports_restarts: true,
        window: 2,
        ..slow()
    };
    pass(&traits, 2, Some(ForeignFault::StopPortal(0)));
}

#[test]
fn wrong_residual_corrupts_no_data() {
    for fault in [
        ForeignFault::WrongResiduals(0.5),
        ForeignFault::ShortReads(0.5),
    ] {
        pass(&Traits::default(), 1, Some(fault));
    }
}

#[test]
fn wrong_tag_ends_session() {
    for paths in [1, 2] {
        for fault in [
            ForeignFault::RepeatResponses(0.1),
            ForeignFault::UnknownTags(0.1),
            ForeignFault::SkipNumbers(0.1),
        ] {
            pass(&Traits::default(), paths, Some(fault));
        }
    }
}

#[test]
fn reset_by_target_repeats_aborted_commands() {
    for qualifier in [0x00, 0x01, 0x02, 0x03] {
        pass(&slow(), 1, Some(ForeignFault::ResetUnit(qualifier)));
    }
}

#[test]
fn missing_unit_is_used_after_its_return() {
    for paths in [1, 2] {
        pass(&Traits::default(), paths, Some(ForeignFault::RemoveUnit));
    }
}

#[test]
fn another_unit_receives_no_write() {
    for paths in [1, 2] {
        pass(&Traits::default(), paths, Some(ForeignFault::ReplaceUnit));
    }
}

#[test]
fn reservation_conflict_is_reported() {
    let fault = ForeignFault::ReturnStatus(0x18, 0.3);
    pass(&Traits::default(), 1, Some(fault));
}

#[test]
fn discovery_finds_thousands_of_targets() {
    let traits = Traits {
        targets: 10_000,
        ..Traits::default()
    };
    pass(&traits, 1, None);
}

#[test]
fn requested_logout_fails_no_request() {
    for paths in [1, 2] {
        pass(&Traits::default(), paths, Some(ForeignFault::RequestLogout));
    }
}

#[test]
fn narrow_window_starves_no_command() {
    for window in [1, 2] {
        let traits = Traits {
            window,
            channels: 2,
            ..Traits::default()
        };
        pass(&traits, 1, None);
    }
}

#[test]
fn small_bursts_transfer_all_data() {
    let traits = Traits {
        max_burst: 1024,
        first_burst: 512,
        immediate: false,
        ..Traits::default()
    };
    pass(&traits, 1, None);
}
