//! Runs the first steps in the README and the book exactly as documented. We use separate
//! namespaces, because the addresses and paths are for a real host.

#![allow(missing_docs, reason = "a test")]

use std::path::Path;
use std::process::Command;

use riser_docs::Page;
use riser_testkit::programs::{directory, missing, skip, succeeded};

/// Creates a file system and network, similar to a new host.
const HOST: &str = r#"
set -eu
# The programs stay visible if they are in one of the directories that become empty.
mount --rbind "$PROGRAMS" /media
for dir in /tmp /run /mnt /var/lib; do mount -t tmpfs tmpfs "$dir"; done
ip link set lo up
mkdir /tmp/checkout && cd /tmp/checkout
# A pause of the text: until the daemon serves, however slow this machine is.
sleep() {
    tries=0
    until riserd status >/dev/null 2>&1; do
        tries=$((tries + 1))
        if [ $tries -gt 200 ]; then cat riserd.log; exit 1; fi
        command sleep 0.1
    done
}
"#;

/// Runs `SCRIPT` as a single block, as if it was pasted.
const PASTED: &str = r#"
set -x
eval "$SCRIPT"
"#;

/// Runs the lines in `COMMANDS` in sequence. The daemon keeps running in the background, as if it
/// was started in another terminal.
const TYPED: &str = r#"
printf %s "$YAML" >riserd.yaml
run() {
    echo "+ $1"
    case $1 in
    "riserd run "*)
        eval "exec $1" 2>riserd.log &
        daemon=$!
        trap 'kill $daemon; wait $daemon' EXIT
        sleep
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

/// Returns the only code block with this language in a section of a document.
fn block(document: &str, section: &str, language: &str) -> String {
    let blocks = Page::read(Path::new(document)).section(section, language);
    assert!(!blocks.is_empty(), "{document}: no {language} in {section}");
    blocks.into_iter().next().unwrap_or_default()
}

/// Returns the commands in a block without comments.
fn commands(block: &str) -> Vec<String> {
    let command = |line: &str| {
        line.split("  #")
            .next()
            .unwrap_or_default()
            .trim_end()
            .to_owned()
    };
    block.lines().map(command).collect()
}

/// Returns a shell that runs in separate namespaces, or an error if this is not possible.
fn shell(script: &str) -> Result<Command, String> {
    if let Some(tool) = missing(&["unshare", "ip", "mount"]) {
        return Err(format!("{tool} is not installed"));
    }
    let isolated = [
        "-r",
        "-m",
        "-n",
        "--kill-child",
        "--fork",
        "--pid",
        "--mount-proc",
    ];
    let mut attempt = Command::new("unshare");
    attempt.args(isolated).arg("true");
    if !attempt.output().is_ok_and(|output| output.status.success()) {
        return Err("namespaces cannot be had".to_owned());
    }
    let programs = directory();
    let path = std::env::var("PATH").unwrap_or_default();
    let path = format!("/media:{path}:/usr/sbin:/sbin");
    let mut shell = Command::new("unshare");
    shell
        .args(isolated)
        .args(["sh", "-c", &format!("{HOST}{script}")])
        .env("PATH", path)
        .env("PROGRAMS", programs);
    for name in [
        "XDG_RUNTIME_DIR",
        "RISERD_SOCKET",
        "RISER_STATE_DIR",
        "RISER_PROVIDER",
    ] {
        shell.env_remove(name);
    }
    Ok(shell)
}

#[test]
fn quickstart_runs_as_pasted() {
    const NAME: &str = "quickstart_runs_as_pasted";
    let install = commands(&block("README.md", "Install", "sh"));
    assert_eq!(install[0], "cargo build --release");
    let configured = include_str!("../../.cargo/config.toml");
    assert!(configured.contains("target-dir = \".build\""));
    assert_eq!(install[1], "export PATH=$PWD/.build/release:$PATH");
    let readme = Page::read(Path::new("README.md"));
    let version = env!("CARGO_PKG_RUST_VERSION");
    assert!(readme.text().contains(&format!("Rust {version} or later")));

    let script = block("README.md", "Quickstart", "sh");
    assert!(script.contains("--runtime 3"));
    let script = script.replace("--runtime 3", "--runtime 1");
    let mut shell = match shell(PASTED) {
        Ok(shell) => shell,
        Err(why) => return skip(NAME, &why),
    };
    let said = succeeded(shell.env("SCRIPT", script));
    for (part, times) in [
        ("1.00 GiB  RISER VIRTUAL DISK  iscsi://127.0.0.1/", 1),
        ("1.00 GiB  RISER VIRTUAL DISK  srp://127.0.0.1/", 1),
        ("IOPS", 4),
    ] {
        assert_eq!(said.matches(part).count(), times, "{part}: {said}");
    }
}

#[test]
fn first_steps_run_as_written() {
    const NAME: &str = "first_steps_run_as_written";
    let has_fuse = Path::new("/dev/fuse").exists();
    let written = [
        block("docs/src/configure.md", "Configure", "sh"),
        block("docs/src/operate.md", "Operate", "sh"),
        block("docs/src/operate.md", "Change one object", "sh"),
        block("docs/src/operate.md", "Grow a disk", "sh"),
        block("docs/src/operate.md", "Change the configuration", "sh"),
        block("docs/src/attach.md", "Attach a disk", "sh"),
        block("docs/src/benchmark.md", "A disk", "sh"),
    ];
    let mut typed = vec!["mkdir -p /var/lib/riser".to_owned()];
    for command in written.iter().flat_map(|block| commands(block)) {
        let words: Vec<&str> = command.split(' ').collect();
        // `--ublk` requires a driver, `riser mount` requires a file system and a loop device (this
        // is covered by another test), and `riserd disconnect` requires a session. `riserd top`
        // runs until the user presses a key. The other test covers `--serve`, which cannot share
        // the addresses of the daemon in this test.
        let is_out = command.contains("--ublk")
            || command.contains("--serve")
            || words.starts_with(&["riser", "mount"])
            || words.starts_with(&["riserd", "disconnect"]);
        if is_out || command == "riserd top" {
            continue;
        }
        let is_fuse = ["--fuse", "/mnt/disk"]
            .iter()
            .any(|word| words.contains(word));
        if is_fuse && !has_fuse && words[0] == "riser" {
            continue;
        }
        let command = command
            .replace("--runtime 5", "--runtime 1")
            .replace("192.0.2.10", "127.0.0.10");
        typed.push(
            if command.contains("riser bench") && !command.contains("--runtime") {
                // The disk is attached during the benchmark.
                format!("{command} --overwrite --runtime 1")
            } else if command.starts_with("riserd diff") {
                format!("{command} || [ $? = 3 ]")
            } else {
                command
            },
        );
    }
    let count = |word: &str| typed.iter().filter(|c| c.starts_with(word)).count();
    assert!(count("riserd ") >= 20 && count("riser ") >= 7, "{typed:?}");
    typed.push("riser detach /tmp/disk.sock".to_owned());
    typed.push("[ $(stat -c %s disk0.img) = 1073741824 ]".to_owned());

    let mut shell = match shell(TYPED) {
        Ok(shell) => shell,
        Err(why) => return skip(NAME, &why),
    };
    shell
        .env(
            "YAML",
            block("docs/src/configure.md", "One disk over SRP", "yaml"),
        )
        .env("COMMANDS", typed.join("\n"));
    let said = succeeded(&mut shell);
    for part in ["target demo", "lun 0: 1.0 GiB", "IOPS"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    if !has_fuse {
        skip(NAME, "the commands with FUSE: no /dev/fuse");
    }
}
