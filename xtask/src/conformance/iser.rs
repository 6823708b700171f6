//! libiscsi's suite over iSER: its client on our `libibverbs.so.1` and `librdmacm.so.1`, against
//! `riserd` on the software NIC, with the expectations of the cases with a Linux kernel.
//!
//! Over iSER the client fails by itself in some tests, and dies in others. They are listed with how
//! each ends, and what it says, in a file that the cases with a kernel use as well: a listed test
//! that ends otherwise is a failure, too. So each test has a process. A listed one has a target of
//! its own, since a client that dies leaves its session and its reservations behind.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::suite::{Run, Test, Verdict};
use super::{CLIENT, IQN, Options};
use crate::daemon::Daemon;
use crate::verbs::{Ended, Rig};
use crate::{Failure, root, sh};

/// Tests that cannot pass for the client's own reasons.
const LISTED: &str = "tests/vm/libiscsi-iser.txt";

/// Those that the cases with a kernel do not have, which give the client one path: as others of the
/// list, one sends a task management function, and one 1000 commands before it takes an answer.
const LISTED_BY_TWO_PATHS: &str = "died MultipathIO.Reset\ndied MultipathIO.CompareAndWriteAsync";

/// A test that takes a block for zero which it has not written: the last of 257, where it writes 256. So it
/// has a target of its own.
const WANTS_ZEROES: &str = "MultipathIO.CompareAndWrite";

/// What the client needs to be a test client, loaded before it.
const PRELOADED: &str = "tests/vm/libiscsi.c";

/// Address of the target.
const SERVER: &str = "127.0.18.1";

/// Clients at once, each at an address of its own. They mostly wait.
const LANES: usize = 3;

/// Bytes of a LUN, fewer than some tests write with one command: over iSER the client sends no
/// command with more than 256 KiB.
const SIZE: u64 = 24 << 20;

/// Longest time of a test.
const PATIENCE: Duration = Duration::from_secs(30);

/// Fewest tests that must pass, so that a client that refuses all is not taken for one that skips.
const FEWEST: usize = 140;

/// A listed test: how it ends, its name, and words that it says.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Listed {
    how: How,
    name: String,
    words: String,
}

/// Ways in which a test ends without a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    /// It says so.
    Failed,
    /// The client died of a signal in it.
    Died,
    /// Its time was up.
    Hung,
}

/// Runs all tests, or why they cannot be run.
pub(super) fn run(
    options: &Options,
    programs: &std::path::Path,
    scratch: &sh::Scratch,
) -> Result<Result<Run, String>, Failure> {
    if options.libiscsi.is_some() {
        return Ok(Err("the list is for the installed client".to_owned()));
    }
    let Some(cc) = sh::which("cc") else {
        return Ok(Err("cc is missing".to_owned()));
    };
    let list = fs::read_to_string(root().join(LISTED))?;
    let listed = parse(&format!("{list}\n{LISTED_BY_TWO_PATHS}\n"))?;
    let tests = chosen(options)?;
    let rig = Rig::new(programs, scratch, &scratch.join("clients"))?;
    let preloaded = scratch.join("client.so");
    let mut compile = sh::cmd(cc, ["-shared", "-fPIC", "-DPATIENCE=3000", "-o"]);
    let source = root().join(PRELOADED);
    sh::output(compile.arg(&preloaded).arg(source).arg("-ldl"))?;
    let config = scratch.join("iser.yaml");
    fs::write(&config, configuration(listed.len()))?;
    let log = scratch.join("iser.log");
    let daemon = Daemon::start(&programs.join("riserd"), &config, &log)?;
    let stage = Stage {
        rig: &rig,
        preloaded,
        listed: &listed,
    };
    let run = stage.run_all(&tests);
    daemon.stop()?;
    let said = fs::read_to_string(&log)?;
    let is_complaint = |line: &&str| line.contains("panicked") || line.contains(" ERROR ");
    if let Some(line) = said.lines().find(is_complaint) {
        return Err(format!("riserd over iSER: {line}").into());
    }
    Ok(Ok(run?))
}

/// The tests of the client, without the family.
fn chosen(options: &Options) -> Result<Vec<String>, Failure> {
    let list = sh::cmd(CLIENT.program, ["--list"]).output()?;
    let list = String::from_utf8_lossy(&list.stdout).into_owned();
    let wanted = options.tests.as_deref().unwrap_or("ALL");
    let is_chosen = |name: &&str| {
        let full = format!("ALL.{name}");
        wanted == "ALL" || full == wanted || full.starts_with(&format!("{wanted}."))
    };
    let names = list
        .lines()
        .filter_map(|line| line.trim().strip_prefix("ALL."));
    let names = names.filter(|name| name.contains('.')).filter(is_chosen);
    Ok(names.map(str::to_owned).collect())
}

/// A target for tests that are not listed, for each lane, one for each that is, and one with zeroes. A
/// LUN is in memory: one test takes it for granted that physical blocks are as long as logical ones.
fn configuration(listed: usize) -> String {
    let (mut backends, mut targets) = (String::new(), String::new());
    for number in 0..=LANES + listed {
        backends += &format!("  ram{number}: {{ kind: ram, size: {SIZE} }}\n");
        targets += &format!(
            "  - name: t{number}\n    iqn: {IQN}-{number}\n    \
             portals: [{{ protocol: iser, listen: \"{SERVER}:3260\" }}]\n    \
             luns: {{ 0: ram{number} }}\n    access: open\n"
        );
    }
    // A client that dies leaves sessions behind, which last for some seconds, and each lane has one address.
    let limits = format!("{{ sessions_per_address: {} }}", 8 * (LANES + listed));
    format!("backends:\n{backends}targets:\n{targets}limits: {limits}\nadmin: {{ socket: none }}\n")
}

struct Stage<'a> {
    rig: &'a Rig,
    preloaded: PathBuf,
    listed: &'a [Listed],
}

impl Stage<'_> {
    /// Runs the tests, some at once; those that are listed first, as some of them wait for long.
    fn run_all(&self, names: &[String]) -> Result<Run, Failure> {
        let mut order: Vec<usize> = (0..names.len()).collect();
        order.sort_by_key(|&i| self.place(&names[i]).is_none());
        let next = AtomicUsize::new(0);
        let done = Mutex::new(Vec::new());
        let began = Instant::now();
        let lane = |lane: usize| {
            while let Some(&i) = order.get(next.fetch_add(1, Ordering::Relaxed)) {
                let test = self.run_one(lane, &names[i]);
                let mut done = done
                    .lock()
                    .unwrap_or_else(std::sync::PoisonError::into_inner);
                done.push((i, test));
            }
        };
        std::thread::scope(|scope| {
            for number in 0..LANES {
                scope.spawn(move || lane(number));
            }
        });
        println!(
            "iSER: {:.1} s, {LANES} clients at once",
            began.elapsed().as_secs_f64()
        );
        let mut done = done.into_inner().unwrap_or_default();
        done.sort_by_key(|(i, _)| *i);
        let tests = done.into_iter().map(|(_, test)| test);
        let run = Run {
            tests: tests.collect::<Result<_, _>>()?,
            is_complete: true,
        };
        let passed = run.tests.iter().filter(|t| t.verdict == Verdict::Passed);
        if passed.clone().count() < FEWEST.min(names.len() / 2) {
            return Err(format!("hardly a test passed over iSER: {}", passed.count()).into());
        }
        Ok(run)
    }

    /// Place of a test in the list.
    fn place(&self, name: &str) -> Option<usize> {
        self.listed.iter().position(|listed| listed.name == name)
    }

    fn run_one(&self, lane: usize, name: &str) -> Result<Test, String> {
        let place = self.place(name);
        let target = match place {
            Some(place) => LANES + place,
            None if name == WANTS_ZEROES => LANES + self.listed.len(),
            None => lane,
        };
        let url = format!("iser://{SERVER}:3260/{IQN}-{target}/0");
        let preload = format!("LD_PRELOAD={}", self.preloaded.display());
        let test = format!("ALL.{name}");
        let words = [
            "env",
            &preload,
            // Over iSER the client puts the data buffer of a command that has failed, however
            // small, among its spare PDU headers, and dies when it uses it as one. It does not if
            // it keeps none.
            "LIBISCSI_CACHE_ALLOCATIONS=0",
            "iscsi-test-cu",
            "--dataloss",
            "-t",
            &test,
            &url,
            &url,
        ];
        let address = format!("127.0.18.{}", 2 + lane);
        let command = self.rig.command(&address, &[], &words);
        let process = self.rig.start(command, name);
        let mut process = process.map_err(|error| format!("{name}: {error}"))?;
        let ended = process.end(Instant::now() + PATIENCE);
        let (suite, test) = name.split_once('.').unwrap_or((name, ""));
        Ok(Test {
            suite: suite.to_owned(),
            name: test.to_owned(),
            verdict: judge(place.map(|place| &self.listed[place]), &ended),
        })
    }
}

/// Verdict on a test, as against its listing.
fn judge(listed: Option<&Listed>, ended: &Ended) -> Verdict {
    let how = match outcome(ended) {
        Ok(verdict) => {
            return match listed {
                // So the list becomes shorter when the client is mended.
                Some(_) => Verdict::Failed(vec![format!("it is listed, and ended by {verdict:?}")]),
                None => verdict,
            };
        }
        Err(how) => how,
    };
    match listed {
        Some(listed) if listed.how == how && ended.said.contains(&listed.words) => {
            Verdict::Skipped(vec!["libiscsi's client cannot do it over iSER".to_owned()])
        }
        _ => {
            // What the test says of it, or else the last words.
            let mut lines = ended.said.lines().map(str::trim);
            let last = || ended.said.trim_end().lines().next_back();
            let why = lines
                .find(|line| line.starts_with("[FAILED]"))
                .or_else(last);
            Verdict::Failed(vec![format!("{how:?}: {}", why.unwrap_or_default().trim())])
        }
    }
}

/// How a test ended: with a verdict, or otherwise. What it printed counts first: a test that says
/// that it has failed, or sees something wrong and then does not come to its end, has failed, also if
/// the client dies of a signal or hangs.
fn outcome(ended: &Ended) -> Result<Verdict, How> {
    let run = Run::parse(&ended.said);
    let verdict = run.tests.into_iter().next().map(|test| test.verdict);
    match verdict {
        Some(Verdict::Failed(_)) => return Err(How::Failed),
        Some(Verdict::Unfinished) if ended.said.contains("[FAILED]") => return Err(How::Failed),
        _ => {}
    }
    let Some(status) = ended.status else {
        return Err(How::Hung);
    };
    match (status.signal(), verdict) {
        // It may be the status of a shell or of `riser run`, which reports the program's signal.
        (Some(_), _) => Err(How::Died),
        (None, Some(verdict @ (Verdict::Passed | Verdict::Skipped(_)))) => Ok(verdict),
        (None, _) => Err(How::Failed),
    }
}

/// Reads the list: a line "HOW NAME WORDS …" for each test.
fn parse(text: &str) -> Result<Vec<Listed>, Failure> {
    let lines = text.lines().map(str::trim);
    let lines = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    let listed = lines.map(|line| {
        let mut parts = line.splitn(3, ' ');
        let how = match parts.next() {
            Some("failed") => How::Failed,
            Some("died") => How::Died,
            Some("hung") => How::Hung,
            _ => return Err(format!("{LISTED}: {line}").into()),
        };
        let (name, words) = (parts.next(), parts.next());
        Ok(Listed {
            how,
            name: name.unwrap_or_default().to_owned(),
            words: words.unwrap_or_default().trim().to_owned(),
        })
    });
    listed.collect()
}

#[cfg(test)]
mod tests {
    use std::process::ExitStatus;

    use super::*;

    fn ended(raw: Option<i32>, said: &str) -> Ended {
        Ended {
            status: raw.map(ExitStatus::from_raw),
            said: format!("Suite: A\n  Test: B ...{said}"),
        }
    }

    #[test]
    fn a_listed_test_must_end_as_it_is_listed() {
        let [failed, died] = &parse("# why\nfailed A.B words of it\n\ndied A.B\n").unwrap()[..]
        else {
            panic!("two are listed");
        };
        let is_excused =
            |listed, ended: &Ended| matches!(judge(Some(listed), ended), Verdict::Skipped(_));
        let said = "    [FAILED] words of it\nFAILED\n";
        assert!(is_excused(failed, &ended(Some(1 << 8), said)));
        // It had failed when the client died.
        assert!(is_excused(
            failed,
            &ended(Some(11), "    [FAILED] words of it\n")
        ));
        assert!(!is_excused(
            failed,
            &ended(Some(1 << 8), "    [FAILED] other words\nFAILED\n")
        ));
        assert!(!is_excused(failed, &ended(Some(0), "passed\n")));
        assert!(!is_excused(failed, &ended(None, "")));
        assert!(is_excused(died, &ended(Some(11), "")));
        assert!(!is_excused(died, &ended(Some(1 << 8), "")));
        assert!(!is_excused(died, &ended(None, "")));
    }

    #[test]
    fn other_tests_end_as_over_tcp() {
        let of = |raw, said| judge(None, &ended(raw, said));
        assert_eq!(of(Some(0), "passed\n"), Verdict::Passed);
        let why = "    [SKIPPED] LUN is not removable. Skipping test.\npassed\n";
        assert!(matches!(of(Some(0), why), Verdict::Skipped(_)));
        assert!(matches!(of(Some(11), ""), Verdict::Failed(_)));
        assert!(matches!(of(None, ""), Verdict::Failed(_)));
        // It could not log in.
        assert!(matches!(of(Some(255 << 8), ""), Verdict::Failed(_)));
    }

    #[test]
    fn the_list_of_the_cases_with_a_kernel_is_understood() {
        let text = fs::read_to_string(root().join(LISTED)).unwrap();
        let listed = parse(&text).unwrap();
        assert!(listed.iter().all(|test| test.name.contains('.')));
        assert!(listed.iter().any(|test| test.how == How::Died));
        assert!(parse("lost A.B").is_err());
    }
}
