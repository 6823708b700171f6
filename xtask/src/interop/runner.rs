//! Guests that take cases from a list, several at once.
//!
//! A guest runs cases of one group, and is exchanged for a new one when the group is another or
//! when a case has failed. Cases that measure come last, with one guest only.
//!
//! An emulated kernel with `rdma_rxe` has races of its own. So a case that has failed is tried once
//! more, by itself in a new guest; if it passes then, its line in the table says so, and why it
//! failed before.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::case::Case;
use super::guest::{Guest, Shape};
use super::judge::{Expected, judge};
use super::kernel::Kernel;
use crate::{Failure, root};

/// Beginning of a line of a case's output that belongs into the table.
const FIGURE: &str = "figure: ";

/// Programs that were built for the cases; empty where no case asks for them.
pub(crate) struct Programs {
    /// The folder of `riserd` and `riser`.
    pub(crate) programs: PathBuf,
    /// The folder of the test programs, under their plain names.
    pub(crate) tests: PathBuf,
}

/// Result of a case.
pub(crate) struct Row<'a> {
    pub(crate) case: &'a Case,
    /// Time that the guest took to boot, if one was booted for this case.
    pub(crate) boot: Option<Duration>,
    /// Time that the case itself took.
    pub(crate) took: Duration,
    /// Figures, a line for each, or the reason of the failure.
    pub(crate) result: Result<Vec<String>, String>,
    /// Reason why the attempt before this one failed, if there was one.
    pub(crate) first: Option<String>,
}

/// Files that the guests share.
pub(crate) struct Rig<'a> {
    /// Kernel that they boot.
    pub(crate) kernel: &'a Kernel,
    /// Programs that they run.
    pub(crate) programs: &'a Programs,
    /// Folder of the logs, with one for each group and one for each guest.
    pub(crate) logs: &'a Path,
}

impl Rig<'_> {
    /// Runs `cases` on up to `jobs` guests at once; returns a row for each case, in their order.
    pub(crate) fn run<'a>(&self, cases: &'a [Case], jobs: usize) -> Vec<Row<'a>> {
        // Cases that measure come last, when no other guest takes time from theirs.
        let (alone, together): (Vec<&Case>, Vec<&Case>) = cases.iter().partition(|c| c.alone);
        let mut rows = self.run_some(together, jobs);
        rows.extend(self.run_some(alone, 1));
        // After all others, so that the second attempt has the machine to itself.
        for row in rows.iter_mut().filter(|row| row.result.is_err()) {
            *row = self.try_again(row);
        }
        rows.sort_by_key(|r| (&r.case.group, &r.case.name));
        rows
    }

    fn run_some<'a>(&self, cases: Vec<&'a Case>, jobs: usize) -> Vec<Row<'a>> {
        let guests = jobs.min(cases.len());
        let waiting = Mutex::new(cases);
        let rows = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for number in 1..=guests {
                let (waiting, rows) = (&waiting, &rows);
                scope.spawn(move || self.serve(number, waiting, rows));
            }
        });
        rows.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// The second attempt at a case. The logs of the first are kept beside those of the second.
    fn try_again<'a>(&self, first: &Row<'a>) -> Row<'a> {
        let case = first.case;
        let logs = self.logs.join(&case.group).join(&case.name);
        let kept = logs.with_extension("first");
        let _ = fs::remove_dir_all(&kept);
        // Without a guest there are none.
        let _ = fs::rename(&logs, &kept);
        let mut second = self.run_case(case, &self.logs.join("guest-1"), &mut None);
        second.first = first.result.as_ref().err().cloned();
        report(&second);
        second
    }

    /// One guest after the other, until no case waits.
    fn serve<'a>(&self, number: usize, waiting: &Mutex<Vec<&'a Case>>, rows: &Mutex<Vec<Row<'a>>>) {
        let folder = self.logs.join(format!("guest-{number}"));
        let mut slot: Option<Guest> = None;
        let mut group = None;
        loop {
            let next = take_case(
                &mut waiting.lock().unwrap_or_else(PoisonError::into_inner),
                group,
            );
            let Some(case) = next else { return };
            // What one group has set up in a guest must not be met by another.
            if group != Some(case.group.as_str()) {
                slot = None;
                group = Some(&case.group);
            }
            let row = self.run_case(case, &folder, &mut slot);
            report(&row);
            rows.lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(row);
        }
    }

    fn run_case<'a>(&self, case: &'a Case, folder: &Path, slot: &mut Option<Guest>) -> Row<'a> {
        let started = Instant::now();
        let boot = slot.is_none().then(|| {
            Guest::boot(self.kernel, folder, Shape::default()).map(|guest| *slot = Some(guest))
        });
        let booted = started.elapsed();
        let row = |result: Result<Vec<String>, Failure>| Row {
            case,
            boot: boot.is_some().then_some(booted),
            took: started.elapsed() - booted,
            result: result.map_err(|e| e.to_string()),
            first: None,
        };
        let Some(guest) = slot else {
            let why = boot.and_then(Result::err);
            return Row {
                case,
                boot: Some(booted),
                took: Duration::ZERO,
                result: Err(why.map_or_else(String::new, |e| format!("no guest: {e}"))),
                first: None,
            };
        };
        let result = self.run_in(guest, case, folder);
        if result.is_err() {
            // What a failed case leaves behind must not fail the next one.
            *slot = None;
        }
        row(result)
    }

    fn run_in(
        &self,
        guest: &mut Guest,
        case: &Case,
        folder: &Path,
    ) -> Result<Vec<String>, Failure> {
        // The variables and the library come first, so that a case is only what it does.
        let script = format!(
            "export RISER_ROOT='{}' RISER_BIN='{}' RISER_TESTS='{}' CASE='{}' ROUNDS='{}'\n\
             . /vm/lib.sh\n{}",
            root().display(),
            self.programs.programs.display(),
            self.programs.tests.display(),
            case.name,
            case.rounds.unwrap_or(1),
            case.text
        );
        let ran = guest.run(&script, case.limit);
        let saved = self.logs.join(&case.group).join(&case.name);
        let _ = fs::remove_dir_all(&saved);
        fs::create_dir_all(&saved)?;
        // Everything is kept before the result is looked at, since it is most needed of a script
        // that failed or timed out.
        keep(guest.share(), &saved)?;
        fs::copy(folder.join("console.log"), saved.join("console.log"))?;
        let ran = ran?;
        fs::write(saved.join("output.log"), &ran.output)?;
        let mut figures = result_of(ran.status, &ran.output)?;
        let judged = judge(&saved, Expected::of(case))?;
        if judged.iser > 0 {
            figures.push(format!(
                "{} packets judged, {} iSER messages among them",
                judged.packets, judged.iser
            ));
        }
        Ok(figures)
    }
}

/// Figures in the output of a script, or why it has failed.
pub(crate) fn result_of(status: i32, output: &str) -> Result<Vec<String>, Failure> {
    if status != 0 {
        let lines: Vec<_> = output.lines().collect();
        let tail = lines[lines.len().saturating_sub(30)..].join("\n");
        return Err(format!("exit status {status}\n{tail}").into());
    }
    let figures = output.lines().filter_map(|l| l.strip_prefix(FIGURE));
    Ok(figures.map(str::to_owned).collect())
}

/// Prints how a case went.
pub(crate) fn report(row: &Row<'_>) {
    let how = if row.result.is_ok() {
        "ok    "
    } else {
        "FAILED"
    };
    let (group, name) = (&row.case.group, &row.case.name);
    println!("{how} {group}/{name} ({:.0} s)", row.took.as_secs_f64());
}

/// Takes the next case: one of the group if there is one.
fn take_case<'a>(waiting: &mut Vec<&'a Case>, group: Option<&str>) -> Option<&'a Case> {
    let same = waiting
        .iter()
        .position(|c| group == Some(c.group.as_str()))
        .unwrap_or(0);
    (!waiting.is_empty()).then(|| waiting.remove(same))
}

/// Moves what a case left in `/vm/keep` to the folder of its logs.
fn keep(share: &Path, saved: &Path) -> Result<(), Failure> {
    let from = share.join("keep");
    if from.is_dir() {
        for entry in fs::read_dir(&from)? {
            let entry = entry?;
            fs::copy(entry.path(), saved.join(entry.file_name()))?;
        }
        fs::remove_dir_all(&from)?;
    }
    Ok(())
}
