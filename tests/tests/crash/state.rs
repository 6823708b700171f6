//! Kills the daemon before each system call that uses a file in the state directory. In this case,
//! the kernel keeps all written data. For power failures, see [`cuts`](super::cuts).
//!
//! After this, the reservations and the configuration must be in the state either before or after
//! the change. If the change was acknowledged, it must be the state after it. In each round, we
//! change a registration, a reservation and the configuration.
//!
//! `RISER_CRASH_STATE` sets the number of files to test (default 2; limited to the number of
//! files).

use std::collections::BTreeSet;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};

use riser_testkit::eventually_some;
use riser_testkit::programs::{missing, skip};
use riser_tests::load::setting;

use crate::daemon::{
    Daemon, GOOD, PATIENCE, REGISTER_AND_IGNORE, RELEASE, RESERVE, paths_in, reserve_in,
    reserve_out, try_log_in,
};

const ADDRESS: &str = "127.0.174.1:3260";

/// State stored by the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kept {
    pub(crate) key: u64,
    pub(crate) is_reserved: bool,
    pub(crate) iops: u64,
}

impl Kept {
    /// Initial state without any changes.
    pub(crate) const FIRST: Self = Self {
        key: 0,
        is_reserved: false,
        iops: 1000,
    };

    fn next(self) -> Self {
        Self {
            key: self.key + 1,
            is_reserved: !self.is_reserved,
            iops: self.iops + 1,
        }
    }
}

/// Applies all three changes, or fewer if the daemon is killed. Calls `show` after each
/// acknowledgement and returns the state.
pub(crate) fn change(
    daemon: &Daemon,
    address: &str,
    from: Kept,
    mut show: impl FnMut(Kept),
) -> Kept {
    let next = from.next();
    let mut acknowledged = from;
    // If the connection is closed, this causes a panic in the client.
    let _: Result<(), _> = catch_unwind(AssertUnwindSafe(|| {
        let mut client = try_log_in(address).expect("a daemon that lives");
        let keys = (0, next.key);
        if reserve_out(&mut client, REGISTER_AND_IGNORE, keys) != GOOD {
            return;
        }
        acknowledged.key = next.key;
        show(acknowledged);
        let action = if next.is_reserved { RESERVE } else { RELEASE };
        if reserve_out(&mut client, action, (next.key, 0)) == GOOD {
            acknowledged.is_reserved = next.is_reserved;
            show(acknowledged);
        }
    }));
    let limit = format!("limits/iops={}", next.iops);
    if daemon.riserd(&["set", "/backends/disk", &limit]).is_some() {
        acknowledged.iops = next.iops;
        show(acknowledged);
    }
    acknowledged
}

/// Returns the stored state after a start.
pub(crate) fn kept_by(daemon: &Daemon, address: &str) -> Kept {
    let mut client = eventually_some("a login", PATIENCE, || try_log_in(address));
    let keys = reserve_in(&mut client, 0);
    let keys: Vec<_> = keys
        .chunks_exact(8)
        .map(|key| key.try_into().unwrap())
        .collect();
    assert!(keys.len() <= 1, "one initiator, one key: {keys:?}");
    let text = daemon
        .riserd(&["get", "/backends/disk", "-o", "json"])
        .unwrap();
    let disk: serde_json::Value = serde_json::from_str(&text).unwrap();
    Kept {
        key: keys.first().map_or(0, |key| u64::from_be_bytes(*key)),
        is_reserved: !reserve_in(&mut client, 1).is_empty(),
        iops: disk["limits"]["iops"].as_u64().unwrap_or(Kept::FIRST.iops),
    }
}

/// Applies a change while using strace with these arguments, which may kill the daemon, and checks
/// the state after a restart. Returns whether the daemon was killed, and whether a part of the
/// change was stored.
///
/// # Panics
/// Panics if the state is not the same as before or after the change, or if an acknowledged change
/// is missing.
fn is_killed_at(daemon: &mut Daemon, strace: &[&str], kept: &mut Kept) -> (bool, bool) {
    let args: Vec<_> = strace.iter().map(|arg| (*arg).to_owned()).collect();
    daemon.start(Some(&args));
    let acknowledged = match daemon.has_ended() {
        true => *kept,
        false => change(daemon, ADDRESS, *kept, |_| ()),
    };
    let is_killed = daemon.has_ended();
    daemon.kill();
    daemon.start(None);
    let (found, next) = (kept_by(daemon, ADDRESS), kept.next());
    let fits = |found: u64, old: u64, acknowledged: u64, new: u64| match acknowledged == new {
        true => found == new,
        false => found == old || found == new,
    };
    assert!(
        fits(found.key, kept.key, acknowledged.key, next.key)
            && fits(found.iops, kept.iops, acknowledged.iops, next.iops)
            && fits(
                found.is_reserved.into(),
                kept.is_reserved.into(),
                acknowledged.is_reserved.into(),
                next.is_reserved.into()
            ),
        "{strace:?}: found {found:?} after {kept:?}, acknowledged {acknowledged:?}"
    );
    daemon.kill();
    let is_half = found != *kept && found != next;
    *kept = found;
    (is_killed, is_half)
}

/// Returns the names of system calls for this path in a trace.
fn calls_on<'a>(trace: &'a str, path: &str) -> BTreeSet<&'a str> {
    // Quoted, or as the path of a descriptor.
    let forms = [format!("\"{path}\""), format!("<{path}>")];
    let lines = trace.lines();
    let lines = lines.filter(|line| forms.iter().any(|form| line.contains(form)));
    // After the thread ID.
    let calls = lines.filter_map(|line| line.split_whitespace().nth(1)?.split_once('('));
    calls.map(|(name, _)| name).collect()
}

#[test]
fn kill_keeps_state_consistent() {
    if let Some(tool) = missing(&["strace"]) {
        return skip("crash state", &format!("{tool} is not installed"));
    }
    let files = setting("RISER_CRASH_STATE", 2) as usize;
    let mut daemon = Daemon::new("state");
    daemon.configure(
        ADDRESS,
        "{ disk: { kind: ram, size: 1MiB } }",
        "{ 0: disk }",
    );
    // Run this once without a kill to get the names of the files.
    let trace = daemon.directory.join("trace");
    let args = [
        "-y",
        "-e",
        "trace=%file,%desc",
        "-o",
        trace.to_str().unwrap(),
    ];
    daemon.start(Some(&args.map(str::to_owned)));
    let mut kept = change(&daemon, ADDRESS, Kept::FIRST, |_| ());
    assert_eq!(kept, Kept::FIRST.next(), "all commands have responses");
    daemon.kill();
    let trace = fs::read_to_string(&trace).unwrap();
    let mut paths = paths_in(&trace, &daemon.state());
    paths.remove(daemon.state().to_str().unwrap());
    assert!(paths.len() >= 5, "files and their hidden forms: {paths:?}");
    let (mut kills, mut halves) = (0, 0);
    let mut struck = BTreeSet::new();
    // Files with different names are far apart in this order.
    let step = paths.len().div_ceil(files.max(1));
    for path in paths.iter().step_by(step) {
        // strace counts the calls separately for each name.
        for name in calls_on(&trace, path) {
            for nth in 1.. {
                let kill = format!("inject={name}:signal=KILL:when={nth}");
                let args = ["-P", path, "-e", &kill, "-o", "/dev/null"];
                let (is_killed, is_half) = is_killed_at(&mut daemon, &args, &mut kept);
                halves += u64::from(is_half);
                if !is_killed {
                    break;
                }
                kills += 1;
                struck.insert(name);
            }
        }
    }
    println!(
        "result: {kills} kills at {struck:?} on {} of {} files, {halves} between two changes",
        paths.len().div_ceil(step),
        paths.len()
    );
    assert!(kills > 0, "no call was met");
}
