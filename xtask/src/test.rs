//! `cargo xtask test`: everything that must hold, and a count of it.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::interop::{self, Ended};
use crate::packages::{Need, ensure, need};
use crate::{Failure, conformance, demo, sh};

/// What the tests use beyond Rust.
pub(crate) const NEEDS: &[Need] = &[
    need(
        "tshark",
        "tshark",
        "checking captures with Wireshark's dissectors",
    ),
    need(
        "qemu-img",
        "qemu-utils",
        "qemu-img and qemu-io as judges of the NBD export",
    ),
    need(
        "nbdcopy",
        "libnbd-bin",
        "nbdcopy and nbdinfo as judges of the NBD export",
    ),
    need("fio", "fio", "fio with its nbd engine"),
    need("tgtd", "tgt", "the iSCSI initiator against another target"),
    need("fusermount3", "fuse3", "FUSE exports without root"),
    need("mkfs.ext4", "e2fsprogs", "file systems on attached LUNs"),
    need("losetup", "mount", "loop devices over FUSE exports"),
    need("ip", "iproute2", "network namespaces"),
    need(
        "promtool",
        "prometheus",
        "metrics and alert rules before Prometheus",
    ),
    need(
        "prometheus",
        "prometheus",
        "the dashboard before Prometheus",
    ),
    need("chromium", "chromium", "the status page in a browser"),
    need("targetcli", "targetcli-fb", "targetcli on LIO's tree"),
    need("dbus-run-session", "dbus-daemon", "targetcli on LIO's tree"),
    // A file of it, as it has no program.
    need(
        "/usr/lib/python3/dist-packages/rtslib_fb/__init__.py",
        "python3-rtslib-fb",
        "rtslib on LIO's tree",
    ),
];

/// Options of `cargo xtask test`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Run only the steps whose name contains one of these words.
    only: Vec<String>,
    /// List the steps.
    #[arg(long)]
    list: bool,
}

/// How a step ended.
enum Outcome {
    /// It holds; some of its own tests were counted.
    Passed(Counts),
    /// It does not hold.
    Failed(Counts, String),
    /// It could not be tried.
    Skipped(String),
}

#[derive(Default, Clone, Copy)]
struct Counts {
    passed: u64,
    failed: u64,
}

struct Step {
    name: &'static str,
    run: fn() -> Outcome,
}

const STEPS: &[Step] = &[
    Step {
        name: "fmt",
        run: || check(sh::cargo(["fmt", "--all", "--check"])),
    },
    Step {
        name: "clippy",
        run: || {
            check(sh::cargo([
                "clippy",
                "-q",
                "--workspace",
                "--all-targets",
                "--",
                "-D",
                "warnings",
            ]))
        },
    },
    Step {
        name: "tests",
        run: || cargo_test(&["--workspace"], &[]),
    },
    Step {
        name: "doc",
        run: doc,
    },
    Step {
        name: "deny",
        run: deny,
    },
    Step {
        name: "simulation of a million messages",
        run: || {
            cargo_test(
                &["--release", "--workspace", "--test", "rc_sim"],
                &[("RISER_SIM_MESSAGES", "1000000")],
            )
        },
    },
    Step {
        name: "sessions and connection cycles",
        run: || {
            cargo_test(
                &[
                    "--release",
                    "--workspace",
                    "--test",
                    "scale",
                    "--",
                    "--test-threads=1",
                    "--nocapture",
                ],
                &[("RISER_CONNECT_CYCLES", "10000")],
            )
        },
    },
    Step {
        name: "configuration changes during I/O",
        run: || {
            cargo_test(
                &[
                    "--release",
                    "--workspace",
                    "--test",
                    "apply",
                    "--",
                    "--nocapture",
                ],
                &[("RISER_CHANGES", "1000")],
            )
        },
    },
    Step {
        name: "a stranger on the network",
        run: || {
            cargo_test(
                &[
                    "--workspace",
                    "--test",
                    "adversary",
                    "--",
                    "--ignored",
                    "--nocapture",
                ],
                &[("RISER_ADVERSARY_SECONDS", "12")],
            )
        },
    },
    Step {
        name: "demo",
        run: demo_step,
    },
    Step {
        name: "iSCSI conformance",
        run: conformance_step,
    },
    Step {
        name: "interop with the kernel",
        run: interop_step,
    },
];

/// Runs the steps; fails if one did.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    if options.list {
        for step in STEPS {
            println!("{}", step.name);
        }
        return Ok(());
    }
    let needs: Vec<_> = NEEDS.iter().collect();
    ensure(&needs);
    let log = skip_log();
    let _ = fs::remove_file(&log);
    let (mut totals, mut skipped, mut rows) = (Counts::default(), 0, Vec::new());
    for step in STEPS {
        if !options.only.is_empty()
            && !options
                .only
                .iter()
                .any(|word| step.name.contains(word.as_str()))
        {
            continue;
        }
        println!("── {}", step.name);
        let started = Instant::now();
        let outcome = (step.run)();
        let took = started.elapsed();
        let row = match outcome {
            Outcome::Passed(c) => {
                totals.passed += c.passed.max(1);
                totals.failed += c.failed;
                row(step.name, "ok", took, &counted(c))
            }
            Outcome::Failed(c, why) => {
                totals.passed += c.passed;
                totals.failed += c.failed.max(1);
                println!("{why}");
                row(step.name, "FAILED", took, &counted(c))
            }
            Outcome::Skipped(why) => {
                skipped += 1;
                row(step.name, "skipped", took, &why)
            }
        };
        println!("{row}");
        rows.push(row);
    }
    let skips = fs::read_to_string(&log).unwrap_or_default();
    println!("\n{}", rows.join("\n"));
    for line in skips.lines() {
        println!("skipped  {line}");
        skipped += 1;
    }
    println!(
        "\n{} passed, {} failed, {} skipped",
        totals.passed, totals.failed, skipped
    );
    if totals.failed > 0 {
        Err(format!("{} failed", totals.failed).into())
    } else {
        Ok(())
    }
}

/// Where tests write a line for each thing that they could not try.
fn skip_log() -> PathBuf {
    std::env::temp_dir().join(format!("riser-skips-{}", std::process::id()))
}

fn row(name: &str, how: &str, took: Duration, more: &str) -> String {
    format!("{how:<8} {name:<36} {:>7.1} s  {more}", took.as_secs_f64())
}

fn counted(c: Counts) -> String {
    if c.passed + c.failed == 0 {
        String::new()
    } else {
        format!("{} passed, {} failed", c.passed, c.failed)
    }
}

fn check(mut command: std::process::Command) -> Outcome {
    match sh::output(&mut command) {
        Ok(_) => Outcome::Passed(Counts::default()),
        Err(e) => Outcome::Failed(Counts::default(), e.to_string()),
    }
}

/// Runs `cargo test` and adds up what its harnesses say.
fn cargo_test(args: &[&str], env: &[(&str, &str)]) -> Outcome {
    let mut command = sh::cargo(["test", "--no-fail-fast"]);
    command
        .args(args)
        .env("RISER_SKIP_LOG", skip_log())
        .envs(env.iter().copied());
    let (text, ok) = match sh::output(&mut command) {
        Ok(text) => (text, true),
        Err(e) => (e.to_string(), false),
    };
    let mut counts = Counts::default();
    for line in text.lines().filter_map(|l| l.strip_prefix("test result: ")) {
        counts.passed += number_before(line, " passed");
        counts.failed += number_before(line, " failed");
    }
    for at in text
        .lines()
        .filter_map(|l| l.find("figure: ").map(|i| &l[i..]))
    {
        println!("{at}");
    }
    if ok {
        Outcome::Passed(counts)
    } else {
        Outcome::Failed(counts, text)
    }
}

fn number_before(line: &str, word: &str) -> u64 {
    line.split(word)
        .next()
        .and_then(|before| before.rsplit(|c: char| !c.is_ascii_digit()).next())
        .and_then(|digits| digits.parse().ok())
        .unwrap_or(0)
}

fn doc() -> Outcome {
    let mut command = sh::cargo(["doc", "-q", "--workspace", "--no-deps"]);
    command.env("RUSTDOCFLAGS", "-D warnings");
    check(command)
}

/// Licences, bans and sources always; advisories where their database can be fetched.
fn deny() -> Outcome {
    if let Err(e) = sh::have_subcommand("deny") {
        return Outcome::Skipped(format!("cargo-deny cannot be installed: {e}"));
    }
    let outcome = check(sh::cargo([
        "deny", "-L", "error", "check", "bans", "licenses", "sources",
    ]));
    if matches!(outcome, Outcome::Passed(_))
        && let Err(e) = sh::output(&mut sh::cargo([
            "deny",
            "-L",
            "error",
            "check",
            "advisories",
        ]))
    {
        let text = e.to_string();
        if text.contains("fetch") {
            note_skip("deny advisories", "the advisory database cannot be fetched");
        } else {
            return Outcome::Failed(Counts::default(), text);
        }
    }
    outcome
}

fn note_skip(name: &str, why: &str) {
    use std::io::Write;
    if let Ok(mut f) = fs::File::options()
        .create(true)
        .append(true)
        .open(skip_log())
    {
        let _ = writeln!(f, "{name}: {why}");
    }
}

fn demo_step() -> Outcome {
    match demo::run(&demo::Options::for_test()) {
        Ok(()) => Outcome::Passed(Counts::default()),
        Err(e) => Outcome::Failed(Counts::default(), e.to_string()),
    }
}

/// libiscsi's whole suite, against us alone.
fn conformance_step() -> Outcome {
    match conformance::run_all(&conformance::Options::for_test()) {
        Ok(conformance::Ended::Passed(passed)) => Outcome::Passed(Counts { passed, failed: 0 }),
        Ok(conformance::Ended::Unavailable(why)) => Outcome::Skipped(why),
        Ok(conformance::Ended::Failed((passed, failed), why)) => {
            Outcome::Failed(Counts { passed, failed }, why)
        }
        Err(e) => Outcome::Failed(Counts::default(), e.to_string()),
    }
}

/// The short cases, wherever the rig can be had.
fn interop_step() -> Outcome {
    match interop::run_cases(&interop::Options::for_test()) {
        Ok(Ended::Passed(passed)) => Outcome::Passed(Counts { passed, failed: 0 }),
        Ok(Ended::Unavailable(why)) => Outcome::Skipped(why),
        Ok(Ended::Failed(counts, why)) => Outcome::Failed(
            Counts {
                passed: counts.0,
                failed: counts.1,
            },
            why,
        ),
        Err(e) => Outcome::Failed(Counts::default(), e.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn harness_lines_are_counted() {
        let line = "ok. 12 passed; 3 failed; 0 ignored; 0 measured; 0 filtered out";
        assert_eq!(number_before(line, " passed"), 12);
        assert_eq!(number_before(line, " failed"), 3);
    }
}
