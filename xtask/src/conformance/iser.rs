//! libiscsi's test suite over iSER. Its client uses our `libibverbs.so.1` and `librdmacm.so.1` to
//! connect to `riserd` on the software NIC. We expect the same results as in the cases with a Linux
//! kernel.
//!
//! Over iSER, the client itself fails or crashes in some tests. These tests are listed in a
//! file with the expected result and output, which is also used by the cases with a kernel. If a
//! listed test has any other result, this is a failure as well. Because of the crashes, we need a
//! separate process for each test. A listed test also needs a separate target, because a client
//! that crashes will leave its session and reservations behind.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::suite::Run;
use super::{CLIENT, IQN, Options};
use crate::cases::{Test, Verdict, in_parallel};
use crate::daemon::Daemon;
use crate::process::Exited;
use crate::verbs::Rig;
use crate::{Failure, root, sh};

/// List of tests that can't pass because of client bugs.
const LISTED: &str = "tests/vm/libiscsi-iser.txt";

/// Additional tests that only run here, because the cases with a kernel use just one path. As with
/// other tests in the list, one sends a task management request and one sends 1000 commands before
/// it receives a response.
const LISTED_BY_TWO_PATHS: &str = "died MultipathIO.Reset\ndied MultipathIO.CompareAndWriteAsync";

/// This test writes 256 blocks, but expects that 257 blocks are set to zero, so it needs a separate
/// target.
const WANTS_ZEROES: &str = "MultipathIO.CompareAndWrite";

/// Library to preload so that the client can be used as a test client.
const PRELOADED: &str = "tests/vm/libiscsi.c";

/// Target address.
const SERVER: &str = "127.0.18.1";

/// Number of parallel clients, each with a separate address. They spend most of their
/// time waiting.
const LANES: usize = 3;

/// LUN size in bytes. Some tests would write more than this in a single command, but over iSER the
/// client doesn't send commands larger than 256 KiB.
const SIZE: u64 = 24 << 20;

/// Maximum time for a test.
const PATIENCE: Duration = Duration::from_secs(30);

/// Minimum number of tests that must pass. If a client rejects everything, it should not be treated
/// as one with skipped tests.
const FEWEST: usize = 140;

/// A listed test with its expected result, its name and the words to be found in its output.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Listed {
    how: How,
    name: String,
    words: String,
}

/// Ways in which a test can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    /// The test reported a failure.
    Failed,
    /// The client was killed by a signal.
    Died,
    /// The test timed out.
    Hung,
}

pub(super) fn run(
    options: &Options,
    programs: &std::path::Path,
    scratch: &sh::Scratch,
) -> Result<Result<Run, String>, Failure> {
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

/// Returns the tests supported by the client, without the family name.
fn chosen(options: &Options) -> Result<Vec<String>, Failure> {
    let list = sh::cmd(CLIENT, ["--list"]).output()?;
    let list = String::from_utf8_lossy(&list.stdout).into_owned();
    let wanted = options.tests();
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

/// Creates a configuration with a target per lane for unlisted tests, a target for each listed
/// test, and a target that is set to zero. All LUNs are in memory, because one test expects that
/// physical and logical blocks have the same size.
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
    // If a client crashes, its sessions will stay open for several seconds, and we only have one
    // address per lane.
    let limits = format!("{{ sessions_per_address: {} }}", 8 * (LANES + listed));
    format!("backends:\n{backends}targets:\n{targets}limits: {limits}\nadmin: {{ socket: none }}\n")
}

struct Stage<'a> {
    rig: &'a Rig,
    preloaded: PathBuf,
    listed: &'a [Listed],
}

impl Stage<'_> {
    /// Runs the tests in parallel. Start with the listed tests, because some of them have to
    /// wait for a long time.
    fn run_all(&self, names: &[String]) -> Result<Run, Failure> {
        let mut order: Vec<_> = names.iter().enumerate().collect();
        order.sort_by_key(|(_, name)| self.place(name).is_none());
        let began = Instant::now();
        let mut done = in_parallel(LANES, order, |lane, (i, name)| {
            (i, self.run_one(lane, name))
        });
        let seconds = began.elapsed().as_secs_f64();
        println!("iSER: {seconds:.1} s, {LANES} clients at once");
        done.sort_by_key(|(i, _)| *i);
        let tests = done.into_iter().map(|(_, test)| test);
        let run = Run {
            tests: tests.collect::<Result<_, _>>()?,
            is_complete: true,
        };
        let passed = run.tests.iter().filter(|t| t.verdict == Verdict::Passed);
        if passed.clone().count() < FEWEST.min(names.len() / 2) {
            return Err(format!("too few tests passed over iSER: {}", passed.count()).into());
        }
        Ok(run)
    }

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
            // If a command fails over iSER, the client will add its data buffer to the list of
            // spare PDU headers. It will then crash when it uses this buffer as a header, because
            // it may be too small. We can avoid this if there is no such list.
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
        let exited = process.finish(Instant::now() + PATIENCE);
        let verdict = verdict_of(place.map(|place| &self.listed[place]), &exited);
        let name = name.to_owned();
        Ok(Test { name, verdict })
    }
}

/// Compares the result of a test with its list entry.
fn verdict_of(listed: Option<&Listed>, exited: &Exited) -> Verdict {
    let how = match outcome(exited) {
        Ok(verdict) => {
            return match listed {
                // This must fail, so that we remove the test from the list when the client is
                // fixed.
                Some(_) => Verdict::Failed(format!("it is listed, but its result is {verdict:?}")),
                None => verdict,
            };
        }
        Err(how) => how,
    };
    match listed {
        Some(listed) if listed.how == how && exited.output.contains(&listed.words) => {
            Verdict::Skipped("not supported by libiscsi's client over iSER".to_owned())
        }
        _ => {
            // Return the reason given by the test, or the last line of output.
            let mut lines = exited.output.lines().map(str::trim);
            let last = || exited.output.trim_end().lines().next_back();
            let why = lines
                .find(|line| line.starts_with("[FAILED]"))
                .or_else(last);
            Verdict::Failed(format!("{how:?}: {}", why.unwrap_or_default().trim()))
        }
    }
}

/// Returns the result of a test. Its output has priority: if a test reports an error but doesn't
/// complete, it has failed even if the client is then killed by a signal or hangs.
fn outcome(exited: &Exited) -> Result<Verdict, How> {
    let run = Run::parse(&exited.output);
    let verdict = run.tests.into_iter().next().map(|test| test.verdict);
    let is_unfinished = verdict == Some(Verdict::unfinished());
    if matches!(verdict, Some(Verdict::Failed(_)))
        && (!is_unfinished || exited.output.contains("[FAILED]"))
    {
        return Err(How::Failed);
    }
    let Some(status) = exited.status else {
        return Err(How::Hung);
    };
    match (status.signal(), verdict) {
        // This can be the exit status of a shell or of `riser run`, which will report the program's
        // signal.
        (Some(_), _) => Err(How::Died),
        (None, Some(verdict @ (Verdict::Passed | Verdict::Skipped(_)))) => Ok(verdict),
        (None, _) => Err(How::Failed),
    }
}

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

    fn finished(raw: Option<i32>, said: &str) -> Exited {
        Exited {
            status: raw.map(ExitStatus::from_raw),
            output: format!("Suite: A\n  Test: B ...{said}"),
        }
    }

    #[test]
    fn listed_test_must_match_list() {
        let [failed, died] = &parse("# why\nfailed A.B words of it\n\ndied A.B\n").unwrap()[..]
        else {
            panic!("two are listed");
        };
        let is_excused = |listed, exited: &Exited| {
            matches!(verdict_of(Some(listed), exited), Verdict::Skipped(_))
        };
        let said = "    [FAILED] words of it\nFAILED\n";
        assert!(is_excused(failed, &finished(Some(1 << 8), said)));
        // The test had already failed when the client crashed.
        assert!(is_excused(
            failed,
            &finished(Some(11), "    [FAILED] words of it\n")
        ));
        assert!(!is_excused(
            failed,
            &finished(Some(1 << 8), "    [FAILED] other words\nFAILED\n")
        ));
        assert!(!is_excused(failed, &finished(Some(0), "passed\n")));
        assert!(!is_excused(failed, &finished(None, "")));
        assert!(is_excused(died, &finished(Some(11), "")));
        assert!(!is_excused(died, &finished(Some(1 << 8), "")));
        assert!(!is_excused(died, &finished(None, "")));
    }

    #[test]
    fn other_tests_end_as_over_tcp() {
        let of = |raw, said| verdict_of(None, &finished(raw, said));
        assert_eq!(of(Some(0), "passed\n"), Verdict::Passed);
        let why = "    [SKIPPED] LUN is not removable. Skipping test.\npassed\n";
        assert!(matches!(of(Some(0), why), Verdict::Skipped(_)));
        assert!(matches!(of(Some(11), ""), Verdict::Failed(_)));
        assert!(matches!(of(None, ""), Verdict::Failed(_)));
        // The client was not able to log in.
        assert!(matches!(of(Some(255 << 8), ""), Verdict::Failed(_)));
    }

    #[test]
    fn kernel_case_list_is_parsed() {
        let text = fs::read_to_string(root().join(LISTED)).unwrap();
        let listed = parse(&text).unwrap();
        assert!(listed.iter().all(|test| test.name.contains('.')));
        assert!(listed.iter().any(|test| test.how == How::Died));
        assert!(parse("lost A.B").is_err());
    }
}
