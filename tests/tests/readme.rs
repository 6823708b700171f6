//! The README's first steps, as they are written there: in namespaces of their own, since the addresses and
//! paths are those of a host.

#![allow(missing_docs, reason = "a test")]

use std::path::Path;
use std::process::Command;

use riser_tests::programs::{folder, missing, skip, succeeded};

const README: &str = include_str!("../../README.md");

/// What runs the commands: a file system and a network like those of a host with nothing on it. The daemon runs
/// beside the commands that follow it, as in another terminal.
const RUN: &str = r#"
set -eu
for dir in /tmp /run /mnt /var/lib; do mount -t tmpfs tmpfs "$dir"; done
ip link set lo up
mkdir /tmp/checkout && cd /tmp/checkout
printf %s "$YAML" >riserd.yaml
run() {
    echo "+ $1"
    case $1 in
    "riserd run "*)
        eval "exec $1" 2>/tmp/riserd.log &
        daemon=$!
        trap 'kill $daemon; wait $daemon' EXIT
        tries=0
        until riserd status >/dev/null 2>&1; do
            tries=$((tries + 1))
            if [ $tries -gt 200 ]; then cat /tmp/riserd.log; exit 1; fi
            sleep 0.1
        done
        ;;
    *) eval "$1" </dev/null ;;
    esac
}
while IFS= read -r line; do
    if [ -n "$line" ]; then run "$line"; fi
done <<COMMANDS
$COMMANDS
COMMANDS
"#;

/// The blocks of code of a section in a language.
fn blocks(section: &str, language: &str) -> Vec<String> {
    let (_, text) = README
        .split_once(&format!("\n## {section}\n"))
        .unwrap_or_else(|| panic!("no section {section}"));
    let text = text.split("\n## ").next().unwrap();
    let fence = format!("```{language}\n");
    let mut blocks = text.split(&fence);
    blocks.next();
    let end = |block: &str| block.split("```").next().unwrap().to_owned();
    blocks.map(end).collect()
}

/// A command without its comment.
fn command(line: &str) -> String {
    line.split("  #").next().unwrap().trim_end().to_owned()
}

#[test]
fn the_first_steps_run_as_they_are_written() {
    const NAME: &str = "the_first_steps_run_as_they_are_written";
    if let Some(tool) = missing(&["unshare", "ip", "mount"]) {
        return skip(NAME, &format!("{tool} is not installed"));
    }
    let inside = |command: &mut Command| -> bool {
        command.output().is_ok_and(|output| output.status.success())
    };
    if !inside(Command::new("unshare").args([
        "-r",
        "-m",
        "-n",
        "--pid",
        "--fork",
        "--mount-proc",
        "true",
    ])) {
        return skip(NAME, "namespaces cannot be had");
    }
    let serve = blocks("Serve a disk", "sh");
    let build: Vec<_> = serve[0].lines().map(command).collect();
    assert_eq!(build[0], "cargo build --release");
    let configured = include_str!("../../.cargo/config.toml");
    assert!(configured.contains("target-dir = \".build\""));
    assert_eq!(build[1], "export PATH=$PWD/.build/release:$PATH");
    let version = env!("CARGO_PKG_RUST_VERSION");
    assert!(README.contains(&format!("Rust {version} or later")));

    let has_fuse = Path::new("/dev/fuse").exists();
    let mut commands = Vec::new();
    for line in serve[1].lines().chain(blocks("Use it", "sh")[0].lines()) {
        let command = command(line);
        let words: Vec<&str> = command.split(' ').collect();
        // The first needs a driver, the second a file system on the disk and a loop device, and has a test of
        // its own. Nothing has failed that the third could clear.
        let is_out = command.contains("--ublk") || words.starts_with(&["riser", "mount"]);
        if is_out || words.starts_with(&["riserd", "clear-flush-failure"]) {
            continue;
        }
        let is_fuse = ["--fuse", "/mnt/disk"]
            .iter()
            .any(|word| words.contains(word));
        if is_fuse && !has_fuse && words[0] == "riser" {
            continue;
        }
        commands.push(command.replace("--runtime 5", "--runtime 1"));
    }
    let count = |word: &str| commands.iter().filter(|c| c.starts_with(word)).count();
    assert!(
        count("riserd ") >= 6 && count("riser ") >= 5,
        "{commands:?}"
    );
    commands.push("riser detach /tmp/disk.sock".to_owned());
    commands.push("[ $(stat -c %s disk0.img) = 1073741824 ]".to_owned());

    let programs = folder();
    // The build is beneath a directory that is hidden inside if it is in /tmp.
    if programs.starts_with("/tmp") {
        return skip(NAME, "the programs are in /tmp");
    }
    let path = std::env::var("PATH").unwrap();
    let mut shell = Command::new("unshare");
    shell
        .args([
            "-r",
            "-m",
            "-n",
            "--kill-child",
            "--fork",
            "--pid",
            "--mount-proc",
            "sh",
            "-c",
            RUN,
        ])
        .env(
            "PATH",
            format!("{}:{path}:/usr/sbin:/sbin", programs.display()),
        )
        .env("YAML", &blocks("Serve a disk", "yaml")[0])
        .env("COMMANDS", commands.join("\n"))
        .env_remove("XDG_RUNTIME_DIR")
        .env_remove("RISERD_SOCKET")
        .env_remove("RISER_STATE_DIR")
        .env_remove("RISER_PROVIDER");
    let said = succeeded(&mut shell);
    for part in ["target demo", "lun 0: 1.0 GiB", "IOPS"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    if !has_fuse {
        skip(NAME, "the commands with FUSE: no /dev/fuse");
    }
}
