//! Runs fabtests, the libfabric test suite, using providers based on verbs.
//!
//! There is no Debian package. We build the tests once, using the sources for the installed
//! libfabric version, and keep them in the user's cache directory. Each provider has a list of
//! unsupported features, which is used to select the tests.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::namespace::ADDRESSES;
use super::runner::Rig;
use crate::cases::{Test, Verdict};
use crate::packages::{self, needs};
use crate::{Failure, sh};

/// Source repository, which has a tag for each version.
const SOURCES: &str = "https://github.com/ofiwg/libfabric";

/// Builds and installs the tests: the arguments are the repository, the tag and the directory.
const BUILD: &str = include_str!("fabtests.sh");

/// Name of each provider in libfabric, and name of its exclusion list.
const PROVIDERS: [(&str, &str); 2] = [
    ("verbs", "verbs/verbs.exclude"),
    ("verbs;ofi_rxm", "ofi_rxm/ofi_rxm.exclude"),
];

pub(super) fn paths() -> Vec<String> {
    PROVIDERS.map(|(name, _)| format!("fabtests/{name}")).into()
}

/// Timeout per test, and for all tests of a provider, in seconds.
const SECONDS: &str = "60";
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(1200);

/// Copies the programs and lists to a directory that test processes can read, and returns this
/// directory.
///
/// # Errors
/// Returns an error if a tool is missing or if the sources can't be downloaded or built.
pub(super) fn unpack(scratch: &sh::Scratch) -> Result<PathBuf, Failure> {
    let there = scratch.join("fabtests");
    let built = build(scratch)?;
    sh::output(sh::cmd("cp", ["-r"]).arg(built).arg(&there))?;
    Ok(there)
}

/// Builds the tests if they are not in the cache.
pub(super) fn build(scratch: &sh::Scratch) -> Result<PathBuf, Failure> {
    if let Some(lacking) = packages::missing(needs("verbs-fabtests")).first() {
        return Err(format!("{} is missing", lacking.program).into());
    }
    let version = sh::output(&mut sh::cmd("fi_info", ["--version"]))?;
    let version = version
        .lines()
        .find_map(|line| line.strip_prefix("libfabric: "));
    let version = version.ok_or("fi_info does not report its version")?.trim();
    let prefix = packages::cache().join(format!("fabtests-{version}"));
    if prefix.join("bin/runfabtests.sh").is_file() {
        return Ok(prefix);
    }
    if !packages::may_install(&format!("fabtests {version} into {}", prefix.display())) {
        return Err("fabtests is not there".into());
    }
    // Install to a temporary directory first, so that an interrupted build is not treated as
    // complete.
    let new = prefix.with_extension("new");
    let _ = fs::remove_dir_all(&new);
    let mut build = sh::cmd("sh", ["-ec", BUILD, SOURCES, &format!("v{version}")]);
    sh::output(build.arg(&new).current_dir(scratch.path()))?;
    let _ = fs::remove_dir_all(&prefix);
    fs::rename(&new, &prefix)?;
    Ok(prefix)
}

/// Runs the tests of a provider. Both sides have both addresses.
pub(super) fn run(rig: &Rig, directory: &Path, provider: usize) -> Result<Vec<Test>, Failure> {
    let (name, list) = PROVIDERS[provider];
    let [server, client] = ADDRESSES.map(|address| address.to_string());
    let at = |path: &str| directory.join(path).display().to_string();
    let (script, programs) = (at("bin/runfabtests.sh"), at("bin"));
    let list = at(&format!("test_configs/{list}"));
    // The script kills all processes with a given name, so it must not see any other processes.
    let alone = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"];
    let options = [
        "bash", &script, "-vv", "-T", SECONDS, "-t", "quick", "-p", &programs, "-f", &list, "-s",
        &server, "-c", &client, name,
    ];
    let words: Vec<_> = alone.into_iter().chain(options).collect();
    let network = rig.network()?;
    let both = format!("{server},{client}");
    let command = rig.command_at(Some(network), &both, &[], &words);
    let mut process = rig.start(command, &format!("fabtests/{name}"))?;
    let exited = process.finish(Instant::now() + PATIENCE);
    let tests = parse(&exited.output);
    let is_whole = exited.output.contains("# Total Fail");
    match (tests.is_empty(), is_whole) {
        (false, true) => Ok(tests),
        _ => Err(format!("it did not finish: {:?}", exited.status).into()),
    }
}

/// Parses the output of the script when run with `-vv`. For each test, this has the name, the
/// result and, if it didn't pass, the test output.
fn parse(said: &str) -> Vec<Test> {
    let mut tests: Vec<Test> = Vec::new();
    for line in said.lines() {
        if let Some(name) = line.strip_prefix("- name:") {
            // The provider is added as a suffix.
            let name = name
                .trim()
                .rsplit_once(" -p ")
                .map_or(name, |(name, _)| name);
            tests.push(Test {
                name: name.trim().to_owned(),
                verdict: Verdict::unfinished(),
            });
            continue;
        }
        let Some(test) = tests.last_mut() else {
            continue;
        };
        if let Some(result) = line.strip_prefix("  result:") {
            test.verdict = match result.trim() {
                "Pass" => Verdict::Passed,
                "Excluded" => Verdict::Skipped("fabtests excludes it for the provider".into()),
                "Notrun" => Verdict::Skipped("libfabric does not offer it".into()),
                _ => Verdict::Failed(String::new()),
            };
        } else if let (Some(last), Verdict::Failed(why)) =
            (line.strip_prefix("    "), &mut test.verdict)
            && !last.trim().is_empty()
        {
            last.trim().clone_into(why);
        }
    }
    tests
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fabtests_results_include_failure_output() {
        let said = "\
- name:   fi_msg -p \"verbs\"
  timestamp: 20261127-192235+0000
  result: Pass
  time:   3
- name:   fi_dgram -p \"verbs\"
  result: Excluded
- name:   fi_cm_data -I 5 -p \"verbs;ofi_rxm\"
  result: Notrun
  server_stdout: |
    fi_getinfo(): common/shared.c:918, ret=-61 (No data available)
- name:   fi_poll -t queue -p \"verbs\"
  result: Fail
  server_stdout: |
    one
  client_cmd: x
  client_stdout: |
    another

- name:   fi_rdm -p \"verbs\"
";
        let of = |name: &str, verdict| Test {
            name: name.to_owned(),
            verdict,
        };
        let expected = [
            of("fi_msg", Verdict::Passed),
            of(
                "fi_dgram",
                Verdict::Skipped("fabtests excludes it for the provider".into()),
            ),
            of(
                "fi_cm_data -I 5",
                Verdict::Skipped("libfabric does not offer it".into()),
            ),
            of("fi_poll -t queue", Verdict::Failed("another".into())),
            of("fi_rdm", Verdict::unfinished()),
        ];
        assert_eq!(parse(said), expected);
    }
}
