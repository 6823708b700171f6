//! Runs the cases in several guests in parallel.
//!
//! A guest only runs cases in the same group. We start a new guest for a different group or
//! after a failure. Cases that measure performance run at the end, with a single guest.
//!
//! An emulated kernel with `rdma_rxe` has its own race conditions. So if a case fails, we run it
//! again in a new guest while no other guest is running. If it then passes, the table shows this
//! along with the reason for the first failure.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use riser_testkit::captures::check_captures;

use super::case::Case;
use super::guest::{Guest, Init};
use super::kernel::Kernel;
use crate::cases::{Row, Verdict, in_parallel, shorten};
use crate::tally::Kind;
use crate::{Failure, root, sh};

/// Prefix of output lines that should be shown in the table.
const RESULT: &str = "result: ";

/// Maximum time for a shutdown. systemd waits for up to 90 seconds for each service.
const SHUTDOWN: Duration = Duration::from_secs(240);

/// Programs built for the cases; these paths are empty if they are not needed.
pub(crate) struct Programs {
    /// Directory of `riserd` and `riser`.
    pub(crate) programs: PathBuf,
    /// Directory of the test programs, using names without a hash.
    pub(crate) tests: PathBuf,
}

/// Files used by all guests.
pub(crate) struct Rig<'a> {
    pub(crate) kernel: &'a Kernel,
    pub(crate) programs: &'a Programs,
    /// Log directory, which contains a directory for each group and each guest.
    pub(crate) logs: &'a Path,
}

impl Rig<'_> {
    /// Runs the cases using up to `jobs` guests in parallel. Returns the results in the same
    /// order as the cases.
    pub(crate) fn run(&self, cases: &[Case], jobs: usize) -> Vec<Row> {
        // Cases that measure performance must run when there is no other guest.
        let (alone, together): (Vec<&Case>, Vec<&Case>) = cases.iter().partition(|c| c.alone);
        let mut rows = self.run_some(together, jobs);
        rows.extend(self.run_some(alone, 1));
        // The second attempt is done at the end, so that it can use the whole machine.
        for (case, row) in &mut rows {
            if let Verdict::Failed(why) = &row.verdict {
                *row = self.try_again(case, why);
            }
        }
        rows.sort_by_key(|(case, _)| (&case.group, &case.name));
        rows.into_iter().map(|(_, row)| row).collect()
    }

    fn run_some<'a>(&self, cases: Vec<&'a Case>, jobs: usize) -> Vec<(&'a Case, Row)> {
        let guests = jobs.min(cases.len());
        let waiting = Mutex::new(cases);
        let rows = in_parallel(guests, 1..=guests, |_, number| self.serve(number, &waiting));
        rows.into_iter().flatten().collect()
    }

    /// Runs a case again. The logs of both attempts are kept.
    fn try_again(&self, case: &Case, first: &str) -> Row {
        let logs = self.logs.join(&case.group).join(&case.name);
        let kept = logs.with_extension("first");
        let _ = fs::remove_dir_all(&kept);
        // If there was no guest, there are no logs.
        let _ = fs::rename(&logs, &kept);
        let mut second = self.run_case(case, &self.logs.join("guest-1"), &mut None);
        second.verdict = match second.verdict {
            Verdict::Passed => Verdict::PassedAgain(shorten(first)),
            Verdict::Failed(why) => {
                Verdict::Failed(format!("{why}\nfirst attempt: {}", shorten(first)))
            }
            verdict => verdict,
        };
        second
    }

    fn serve<'a>(&self, number: usize, waiting: &Mutex<Vec<&'a Case>>) -> Vec<(&'a Case, Row)> {
        let directory = self.logs.join(format!("guest-{number}"));
        let mut slot: Option<Guest> = None;
        let mut group = None;
        let mut rows = Vec::new();
        let next = |group| take_case(&mut waiting.lock().expect("no guest panics"), group);
        while let Some(case) = next(group) {
            // Don't reuse a guest for a different group, because it may contain state from the
            // previous group.
            if group != Some(case.group.as_str()) {
                slot = None;
                group = Some(&case.group);
            }
            rows.push((case, self.run_case(case, &directory, &mut slot)));
        }
        rows
    }

    fn run_case(&self, case: &Case, directory: &Path, slot: &mut Option<Guest>) -> Row {
        Row::run(&case.path(), Kind::Case, |results| {
            let result = match case.boots {
                Some(boots) => {
                    *slot = None;
                    self.run_boots(case, boots, directory)
                }
                None => self.run_once(case, directory, slot),
            };
            if result.is_err() {
                // Don't reuse the guest after a failure, because it could affect the next case.
                *slot = None;
            }
            result.map(|lines| *results = lines).into()
        })
    }

    fn run_once(
        &self,
        case: &Case,
        directory: &Path,
        slot: &mut Option<Guest>,
    ) -> Result<Vec<String>, Failure> {
        let began = Instant::now();
        let mut results = Vec::new();
        let guest = match slot {
            Some(guest) => guest,
            None => {
                let guest = Guest::boot(self.kernel, directory, Init::Script)
                    .map_err(|e| format!("cannot start the guest: {e}"))?;
                results.push(format!("boot {:.1} s", began.elapsed().as_secs_f64()));
                slot.insert(guest)
            }
        };
        let logs = self.logs.join(&case.group).join(&case.name);
        results.extend(self.run_in(guest, case, 1, directory, &logs)?);
        Ok(results)
    }

    /// Boots and shuts down a guest several times and runs the script after each boot.
    fn run_boots(&self, case: &Case, boots: u32, directory: &Path) -> Result<Vec<String>, Failure> {
        let logs = self.logs.join(&case.group).join(&case.name);
        let _ = fs::remove_dir_all(&logs);
        let mut results = Vec::new();
        for boot in 1..=boots {
            let init = match boot {
                1 => Init::Systemd,
                _ => Init::SystemdAgain,
            };
            let saved = logs.join(format!("boot-{boot}"));
            let ran = Guest::boot(self.kernel, directory, init).and_then(|mut guest| {
                let ran = self.run_in(&mut guest, case, boot, directory, &saved)?;
                guest.power_off(SHUTDOWN)?;
                Ok(ran)
            });
            // Include the shutdown, and any boot that failed.
            fs::create_dir_all(&saved)?;
            fs::copy(directory.join("console.log"), saved.join("console.log"))?;
            results.extend(ran.map_err(|e| format!("boot {boot}: {e}"))?);
        }
        Ok(results)
    }

    fn run_in(
        &self,
        guest: &mut Guest,
        case: &Case,
        boot: u32,
        directory: &Path,
        saved: &Path,
    ) -> Result<Vec<String>, Failure> {
        // Add the variables and the library here, so that the script itself only contains the test.
        let script = format!(
            "export RISER_ROOT='{}' RISER_BIN='{}' RISER_TESTS='{}' CASE='{}' ROUNDS='{}' BOOT='{boot}'\n\
             . /vm/lib.sh\n{}",
            root().display(),
            self.programs.programs.display(),
            self.programs.tests.display(),
            case.name,
            case.rounds.unwrap_or(1),
            case.text
        );
        let ran = guest.run(&script, case.limit);
        let _ = fs::remove_dir_all(saved);
        fs::create_dir_all(saved)?;
        // Save all files before we check the result, because they are most useful after a failure
        // or timeout.
        save_logs(guest.share(), saved)?;
        fs::copy(directory.join("console.log"), saved.join("console.log"))?;
        let ran = ran?;
        fs::write(saved.join("output.log"), &ran.output)?;
        let mut results = result_of(ran.status, &ran.output)?;
        let counts = check_captures(saved, case.expected())?;
        if counts.iser > 0 {
            results.push(format!(
                "checked {} packets, including {} iSER messages",
                counts.packets, counts.iser
            ));
        }
        Ok(results)
    }
}

/// Returns the measured values in a script's output, or the error.
pub(crate) fn result_of(status: i32, output: &str) -> Result<Vec<String>, Failure> {
    if status != 0 {
        let tail = sh::last_lines(output, 30).join("\n");
        return Err(format!("exit status {status}\n{tail}").into());
    }
    let results = output.lines().filter_map(|l| l.strip_prefix(RESULT));
    Ok(results.map(str::to_owned).collect())
}

/// Returns the next case to run, using the same group if possible.
fn take_case<'a>(waiting: &mut Vec<&'a Case>, group: Option<&str>) -> Option<&'a Case> {
    let same = waiting
        .iter()
        .position(|c| group == Some(c.group.as_str()))
        .unwrap_or(0);
    (!waiting.is_empty()).then(|| waiting.remove(same))
}

/// Moves the files in `/vm/keep` to the log directory of this case.
fn save_logs(share: &Path, saved: &Path) -> Result<(), Failure> {
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
