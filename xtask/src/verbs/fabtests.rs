//! fabtests, libfabric's own tests, over the providers that use verbs.
//!
//! Debian does not package them. They are built once from the sources of the libfabric that is
//! installed, and kept in the user's cache folder. Each provider has a list of what it does not
//! offer, by which its tests are chosen.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::namespace::ADDRESSES;
use super::pyverbs::{Test, Verdict};
use super::runner::Rig;
use crate::packages::{self, Need, need};
use crate::{Failure, sh};

/// Debian packages to build them with.
pub(super) const NEEDS: &[Need] = &[
    need("fi_info", "libfabric-bin", PURPOSE),
    need("/usr/include/rdma/fabric.h", "libfabric-dev", PURPOSE),
    need("git", "git", PURPOSE),
    need("gcc", "gcc", PURPOSE),
    need("make", "make", PURPOSE),
    need("autoreconf", "autoconf", PURPOSE),
    need("automake", "automake", PURPOSE),
    need("libtoolize", "libtool", PURPOSE),
];

const PURPOSE: &str = "libfabric's own tests";

/// Sources, with a tag for each version.
const SOURCES: &str = "https://github.com/ofiwg/libfabric";

/// Providers, as libfabric names them and as their lists of exclusions are called.
pub(super) const PROVIDERS: [(&str, &str); 2] = [
    ("verbs", "verbs/verbs.exclude"),
    ("verbs;ofi_rxm", "ofi_rxm/ofi_rxm.exclude"),
];

/// Longest time of a test, in seconds, and of all tests of a provider.
const SECONDS: &str = "60";
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(1200);

/// Answers a folder that processes can read, with programs and lists.
///
/// # Errors
/// A tool is missing, or the sources cannot be fetched or built.
pub(super) fn unpack(scratch: &sh::Scratch) -> Result<PathBuf, Failure> {
    let there = scratch.join("fabtests");
    let built = build(scratch)?;
    sh::output(sh::cmd("cp", ["-r"]).arg(built).arg(&there))?;
    Ok(there)
}

/// Builds them where the cache has none.
fn build(scratch: &sh::Scratch) -> Result<PathBuf, Failure> {
    if let Some(lacking) = packages::missing(NEEDS).first() {
        return Err(format!("{} is missing", lacking.program).into());
    }
    let version = sh::output(&mut sh::cmd("fi_info", ["--version"]))?;
    let version = version
        .lines()
        .find_map(|line| line.strip_prefix("libfabric: "));
    let version = version.ok_or("fi_info does not say its version")?.trim();
    let prefix = packages::cache().join(format!("fabtests-{version}"));
    if prefix.join("bin/runfabtests.sh").is_file() {
        return Ok(prefix);
    }
    if !packages::may_install(&format!("fabtests {version} into {}", prefix.display())) {
        return Err("fabtests is not there".into());
    }
    let sources = scratch.join("libfabric");
    let tag = format!("v{version}");
    let clone = ["clone", "-q", "--depth", "1", "--branch", &tag, SOURCES];
    sh::output(sh::cmd("git", clone).arg(&sources)).map_err(|why| {
        let why = why.to_string();
        format!("{SOURCES}: {}", why.lines().last().unwrap_or_default())
    })?;
    let folder = sources.join("fabtests");
    // Installed into another folder first: what a build that is cut short leaves is not taken for
    // the whole.
    let new = prefix.with_extension("new");
    let _ = fs::remove_dir_all(&new);
    let jobs = std::thread::available_parallelism()?.to_string();
    let configure = format!("--prefix={}", new.display());
    let steps: [&[&str]; 4] = [
        &["sh", "./autogen.sh"],
        &[
            "sh",
            "./configure",
            &configure,
            "--disable-dependency-tracking",
        ],
        &["make", "-j", &jobs],
        &["make", "install"],
    ];
    for step in steps {
        let mut command = sh::cmd(step[0], &step[1..]);
        sh::output(command.current_dir(&folder))?;
    }
    let mut lists = sh::cmd("cp", ["-r", "test_configs"]);
    sh::output(lists.arg(&new).current_dir(&folder))?;
    let _ = fs::remove_dir_all(&prefix);
    fs::rename(&new, &prefix)?;
    Ok(prefix)
}

/// Runs the tests of a provider. Both ends have both addresses.
pub(super) fn run(rig: &Rig, folder: &Path, provider: usize) -> Result<Vec<Test>, Failure> {
    let (name, list) = PROVIDERS[provider];
    let [server, client] = ADDRESSES.map(|address| address.to_string());
    let at = |path: &str| folder.join(path).display().to_string();
    let (script, programs) = (at("bin/runfabtests.sh"), at("bin"));
    let list = at(&format!("test_configs/{list}"));
    // Its script ends all processes of a name, so it sees no others.
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
    let ended = process.end(Instant::now() + PATIENCE);
    let tests = parse(&ended.said);
    let is_whole = ended.said.contains("# Total Fail");
    match (tests.is_empty(), is_whole) {
        (false, true) => Ok(tests),
        _ => Err(format!("it did not end, {:?}", ended.status).into()),
    }
}

/// Reads what the script prints with `-vv`: for each test its name, its result, and what it has said
/// where it did not pass.
fn parse(said: &str) -> Vec<Test> {
    let mut tests: Vec<Test> = Vec::new();
    for line in said.lines() {
        if let Some(name) = line.strip_prefix("- name:") {
            // The name ends with the provider.
            let name = name
                .trim()
                .rsplit_once(" -p ")
                .map_or(name, |(name, _)| name);
            tests.push(Test {
                name: name.trim().to_owned(),
                verdict: Verdict::Unfinished,
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
    fn results_are_read_with_the_last_words_of_failures() {
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
            of("fi_rdm", Verdict::Unfinished),
        ];
        assert_eq!(parse(said), expected);
    }
}
