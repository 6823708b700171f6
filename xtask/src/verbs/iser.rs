//! Tests iSER storage using external programs with our libraries: tgt as a target, and the libiscsi
//! tools and QEMU as clients. They connect to each other and to `riserd` and `riser`. We also test
//! what happens if one side is killed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use super::runner::{Rig, failure, status, tail};
use crate::daemon::Daemon;
use crate::process::{Exited, Process};
use crate::tgt::free_port;
use crate::{Failure, sh};

/// Target address. The client uses the next address, and `riser` the one after it.
const SERVER: &str = "127.0.19.1";
const CLIENT: &str = "127.0.19.2";
const RISER: &str = "127.0.19.3";

/// Target names.
const OF_TGT: &str = "iqn.2026-01.org.example:tgt";
const OF_RISERD: &str = "iqn.2026-01.org.example:riserd";

/// Initiator name to use for `riser`.
const INITIATOR: &str = "iqn.2026-01.org.example:riser";

/// Initiators allowed by tgt, which requires a list of them for iSER.
const INITIATORS: [&str; 5] = [
    INITIATOR,
    "iqn.2007-10.com.github:sahlberg:libiscsi:iscsi-inq",
    "iqn.2010-11.libiscsi:iscsi-perf",
    "iqn.2007-10.com.github:sahlberg:libiscsi:iscsi-readcapacity16",
    "iqn.2008-11.org.linux-kvm",
];

/// Disk size in bytes.
const SIZE: u64 = 32 << 20;

/// Default timeout for a program.
const PATIENCE: Duration = Duration::from_secs(30);

/// Maximum time to wait until a target is ready.
const START: Duration = Duration::from_secs(20);

/// A test case: name, required external programs separated by spaces, and the test function.
pub(super) struct Case {
    pub(super) name: &'static str,
    pub(super) needs: &'static str,
    run: fn(&Stage<'_>) -> Result<(), Failure>,
}

const fn case(
    name: &'static str,
    needs: &'static str,
    run: fn(&Stage<'_>) -> Result<(), Failure>,
) -> Case {
    Case { name, needs, run }
}

impl Case {
    pub(super) fn path(&self) -> String {
        format!("iser/{}", self.name)
    }

    pub(super) fn run(&self, rig: &Rig, programs: &Path) -> Result<(), Failure> {
        let stage = Stage {
            rig,
            programs,
            directory: rig.directory("iser")?,
            case: self.path(),
        };
        (self.run)(&stage)
    }
}

pub(super) const CASES: &[Case] = &[
    case("riser, tgt", "tgtd tgtadm", riser_and_tgt),
    case("riser, tgt is killed", "tgtd tgtadm", tgt_is_killed),
    case(
        "libiscsi, riserd",
        "iscsi-inq iscsi-readcapacity16 iscsi-perf",
        |stage| stage.libiscsi(&stage.riserd()?.1),
    ),
    case(
        "libiscsi, tgt",
        "tgtd tgtadm iscsi-inq iscsi-readcapacity16 iscsi-perf",
        |stage| {
            let tgt = stage.tgt("tgtd")?;
            stage.libiscsi(&tgt.url())?;
            tgt.stop()
        },
    ),
    case(
        "libiscsi, riserd is killed",
        "qemu-img qemu-io iscsi-inq iscsi-readcapacity16 iscsi-perf",
        riserd_is_killed,
    ),
    case("QEMU, riserd", "qemu-img qemu-io", qemu_and_riserd),
    case("QEMU, tgt", "tgtd tgtadm qemu-img qemu-io", qemu_and_tgt),
];

struct Stage<'a> {
    rig: &'a Rig,
    programs: &'a Path,
    /// Directory that is writable for test processes.
    directory: PathBuf,
    case: String,
}

impl Stage<'_> {
    fn start(&self, command: Command, name: &str) -> Result<Process, Failure> {
        self.rig.start(command, &format!("{}.{name}", self.case))
    }

    /// Runs an external program using our libraries, which must exit with success. Returns its
    /// output.
    fn client(&self, words: &[&str]) -> Result<String, Failure> {
        let command = self.rig.command(CLIENT, &[], words);
        self.finish(command, words[0], PATIENCE)
    }

    /// Same, but runs `riser` using its own software NIC.
    fn riser(&self, words: &[&str]) -> Result<String, Failure> {
        self.finish(self.riser_command(words), words[0], PATIENCE)
    }

    fn riser_command(&self, words: &[&str]) -> Command {
        let mut command = sh::cmd(self.rig.riser(), words);
        command.args(["--addr", RISER]);
        self.rig.without_rights(&command, None)
    }

    fn finish(&self, command: Command, name: &str, time: Duration) -> Result<String, Failure> {
        let mut process = self.start(command, name)?;
        succeed(name, &process.finish(Instant::now() + time))
    }

    /// Creates a file with different data in every block. The file is readable for test processes.
    fn pattern(&self, name: &str, length: usize) -> Result<(PathBuf, Vec<u8>), Failure> {
        let bytes: Vec<u8> = (0..length)
            .map(|i| (i as u32).wrapping_mul(0x9e37_79b1).to_be_bytes()[i % 4])
            .collect();
        let path = self.directory.join(name);
        fs::write(&path, &bytes)?;
        Ok((path, bytes))
    }

    /// Creates an empty disk if it doesn't exist.
    fn disk(&self) -> Result<PathBuf, Failure> {
        let path = self.directory.join("disk");
        if !path.exists() {
            fs::File::create(&path)?.set_len(SIZE)?;
            self.rig.hand_over(&path)?;
        }
        Ok(path)
    }

    fn riserd(&self) -> Result<(Daemon, String), Failure> {
        let config = self.directory.join("riserd.yaml");
        // Over iSER, libiscsi limits each command to 256 KiB. QEMU uses the limit returned by the
        // target.
        let text = format!(
            "backends:\n  disk: {{ kind: file, path: {} }}\n\
             limits: {{ max_transfer: 256KiB }}\n\
             targets:\n  - name: riserd\n    iqn: {OF_RISERD}\n    \
             portals: [{{ protocol: iser, listen: \"{SERVER}:3260\" }}]\n    \
             luns: {{ 0: disk }}\n    access: open\nadmin: {{ socket: none }}\n",
            self.disk()?.display()
        );
        fs::write(&config, text)?;
        let log = self.directory.join("riserd.log");
        let daemon = Daemon::start(&self.programs.join("riserd"), &config, &log)?;
        Ok((daemon, format!("iser://{SERVER}:3260/{OF_RISERD}/0")))
    }

    fn tgt(&self, log: &str) -> Result<Tgt<'_>, Failure> {
        Tgt::start(self, log)
    }

    fn libiscsi(&self, url: &str) -> Result<(), Failure> {
        expect_output(&self.client(&["iscsi-inq", url])?, "Vendor:")?;
        let said = self.client(&["iscsi-readcapacity16", url])?;
        expect_output(&said, &format!("Total size:{SIZE}"))?;
        let said = self.client(&["iscsi-perf", "-t", "2", "-r", url])?;
        expect_output(&said, "iops average")
    }
}

/// A `tgtd` using our libraries. It's killed on drop.
struct Tgt<'a> {
    stage: &'a Stage<'a>,
    process: Process,
}

impl<'a> Tgt<'a> {
    fn start(stage: &'a Stage<'a>, log: &str) -> Result<Self, Failure> {
        let disk = stage.disk()?;
        // The RDMA port is always 3260, and a TCP port is used as well.
        let portal = format!("portal={SERVER}:{}", free_port()?);
        let words = ["tgtd", "-f", "--iser", "pool_sz_mb=32", "--iscsi", &portal];
        let mut command = stage.rig.command(SERVER, &[], &words);
        command.env("TGT_IPC_SOCKET", stage.directory.join("ipc"));
        let process = stage.start(command, log)?;
        let mut tgt = Self { stage, process };
        let target = ["target", "--op", "new", "--tid", "1", "-T", OF_TGT];
        // There is no ready notification, so we retry the first command until the socket exists.
        let process = &mut tgt.process;
        process.wait_until(START, |_| manage(stage, &target).is_ok())?;
        let disk = disk.display().to_string();
        tgt.manage(&[
            "logicalunit",
            "--op",
            "new",
            "--tid",
            "1",
            "--lun",
            "1",
            "-b",
            &disk,
        ])?;
        tgt.manage(&["target", "--op", "bind", "--tid", "1", "-I", "ALL"])?;
        for name in INITIATORS {
            tgt.manage(&["target", "--op", "bind", "--tid", "1", "-Q", name])?;
        }
        Ok(tgt)
    }

    fn url(&self) -> String {
        format!("iser://{SERVER}:3260/{OF_TGT}/1")
    }

    fn manage(&self, words: &[&str]) -> Result<(), Failure> {
        manage(self.stage, words)
    }

    /// Stops the daemon as described in its manual, so that all library resources are released.
    /// This requires a target without sessions, because the daemon will crash if it has to close an
    /// iSER session.
    fn stop(mut self) -> Result<(), Failure> {
        let started = Instant::now();
        while let Err(error) = self.manage(&["target", "--op", "delete", "--tid", "1"]) {
            if started.elapsed() > START {
                return Err(error);
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        self.manage(&["system", "--op", "delete"])?;
        succeed("tgtd", &self.process.finish(Instant::now() + START)).map(drop)
    }
}

/// Runs `tgtadm` in the given mode. This must be done by the same user.
fn manage(stage: &Stage<'_>, words: &[&str]) -> Result<(), Failure> {
    let command = sh::cmd("tgtadm", ["--lld", "iser", "--mode"].iter().chain(words));
    let mut command = stage.rig.without_rights(&command, None);
    command.env("TGT_IPC_SOCKET", stage.directory.join("ipc"));
    sh::output(&mut command).map(drop)
}

pub(crate) fn has_qemu_driver() -> bool {
    // There is no target on this port. For an unknown protocol, QEMU before version 8 reports that
    // it's unknown, and newer versions report that they can't load the module.
    let unserved = "iscsi://127.0.0.1:1/iqn.2026-01.org.example:none/0";
    let output = sh::output(&mut sh::cmd("qemu-img", ["info", unserved]));
    output.is_err_and(|error| {
        let error = error.to_string();
        !error.contains("Unknown protocol") && !error.contains("Unable to load module")
    })
}

fn succeed(name: &str, exited: &Exited) -> Result<String, Failure> {
    let status = status(name, exited)?;
    match status.success() {
        true => Ok(exited.output.clone()),
        false => Err(failure(name, &status.to_string(), exited)),
    }
}

fn expect_output(said: &str, words: &str) -> Result<(), Failure> {
    match said.contains(words) {
        true => Ok(()),
        false => Err(format!("missing {words:?} in the output\n{}", tail(said)).into()),
    }
}

/// Returns a tgt address for `riser`, including the initiator name expected by tgt.
fn with_name(url: &str) -> String {
    format!("{url}?initiator={INITIATOR}")
}

fn riser_and_tgt(stage: &Stage<'_>) -> Result<(), Failure> {
    let tgt = stage.tgt("tgtd")?;
    let found = stage.riser(&["discover", &with_name(&format!("iser://{SERVER}"))])?;
    expect_output(&found, OF_TGT)?;
    let url = with_name(&tgt.url());
    expect_output(&stage.riser(&["inquiry", &url])?, "IET")?;
    // Use a size that is not a multiple of the size of a command.
    let (first, bytes) = stage.pattern("first", (9 << 20) + 4096)?;
    let first = first.display().to_string();
    stage.riser(&["write", &url, &first, "--offset", "1MiB"])?;
    if fs::read(stage.disk()?)?[1 << 20..][..bytes.len()] != bytes {
        return Err("data written by riser are missing in tgt's file".into());
    }
    let second = stage.directory.join("second");
    let to = second.display().to_string();
    let length = bytes.len().to_string();
    stage.riser(&["read", &url, &to, "--offset", "1MiB", "--length", &length])?;
    if fs::read(second)? != bytes {
        return Err("riser read other data than it wrote".into());
    }
    let sizes = "--bssplit=512/20:4K/40:64K/20:256K/10:512K/10";
    let words = [
        "bench",
        &url,
        "--overwrite",
        "--rw=randrw",
        "--verify",
        sizes,
    ];
    stage.riser(&[&words[..], &["--runtime=2s", "--warm-up=0s"]].concat())?;
    tgt.stop()
}

/// Kills `tgtd` during verified I/O and starts a new instance. No write must be lost.
fn tgt_is_killed(stage: &Stage<'_>) -> Result<(), Failure> {
    let tgt = stage.tgt("tgtd")?;
    let url = with_name(&tgt.url());
    let words = ["bench", &url, "--overwrite", "--rw=randrw", "--verify"];
    let words = [&words[..], &["--runtime=4s", "--warm-up=0s"]].concat();
    let mut bench = stage.start(stage.riser_command(&words), "bench")?;
    std::thread::sleep(Duration::from_secs(1));
    if bench.has_exited()? {
        return succeed("riser bench", &bench.finish(Instant::now())).map(drop);
    }
    drop(tgt);
    let tgt = stage.tgt("tgtd again")?;
    succeed("riser bench", &bench.finish(Instant::now() + 2 * PATIENCE))?;
    tgt.stop()
}

/// Kills `riserd` while a libiscsi client is connected. The library must report this to the client,
/// and the next `riserd` must accept another client. The first client will not reconnect, because
/// libiscsi 1.19 would use TCP for this.
fn riserd_is_killed(stage: &Stage<'_>) -> Result<(), Failure> {
    let (daemon, url) = stage.riserd()?;
    let words = qemu_io(&["write 0 64k", "sleep 3000", "read 0 64k"], &url);
    let words = [&["env", "LIBISCSI_DEBUG=2"], &words[..]].concat();
    let client = stage.rig.command(CLIENT, &[], &words);
    let mut client = stage.start(client, "qemu-io")?;
    client.wait_until(PATIENCE, |client| {
        client.output().contains("wrote 65536/65536")
    })?;
    drop(daemon);
    let (daemon, url) = stage.riserd()?;
    client.wait_until(PATIENCE, |client| {
        client.output().contains("reconnect initiated")
    })?;
    drop(client);
    stage.libiscsi(&url)?;
    daemon.stop()
}

/// Copies an image to the disk and compares it. The comparison must also find a single changed
/// byte. Also tests single writes and reads.
fn qemu_and_riserd(stage: &Stage<'_>) -> Result<(), Failure> {
    let (daemon, url) = stage.riserd()?;
    let (image, bytes) = stage.pattern("image", SIZE as usize)?;
    let image = image.display().to_string();
    stage.client(&[
        "qemu-img", "convert", "-n", "-f", "raw", "-O", "raw", &image, &url,
    ])?;
    // We also need to check the file itself: if the same client uses a wrong offset for both write
    // and read, its own comparison would still succeed.
    if fs::read(stage.disk()?)? != bytes {
        return Err("data written by qemu-img are missing in riserd's file".into());
    }
    let compare = [
        "qemu-img", "compare", "-f", "raw", "-F", "raw", &image, &url,
    ];
    expect_output(&stage.client(&compare)?, "identical")?;
    let commands = [
        "write -P 0x5a 1M 256k",
        "flush",
        "read -P 0x5a 1M 256k",
        "read 0 32M",
    ];
    is_verified(&stage.client(&qemu_io(&commands, &url))?)?;
    if stage.client(&compare).is_ok() {
        return Err("qemu-img finds different images identical".into());
    }
    daemon.stop()
}

/// Only tests single writes and reads: tgt doesn't report a maximum transfer length, so QEMU can't
/// copy.
fn qemu_and_tgt(stage: &Stage<'_>) -> Result<(), Failure> {
    let tgt = stage.tgt("tgtd")?;
    let url = tgt.url();
    expect_output(
        &stage.client(&["qemu-img", "info", &url])?,
        &format!("({SIZE} bytes)"),
    )?;
    let commands = [
        "write -P 0x5a 1M 256k",
        "flush",
        "read -P 0x5a 1M 256k",
        "read -P 0 0 256k",
    ];
    is_verified(&stage.client(&qemu_io(&commands, &url))?)?;
    tgt.stop()
}

fn qemu_io<'a>(commands: &[&'a str], url: &'a str) -> Vec<&'a str> {
    let mut words = vec!["qemu-io", "-f", "raw"];
    words.extend(commands.iter().flat_map(|command| ["-c", command]));
    words.push(url);
    words
}

/// `qemu-io` also returns success if the pattern was not found, so we have to check the output.
fn is_verified(said: &str) -> Result<(), Failure> {
    match said.contains("failed") {
        true => Err(format!("qemu-io:\n{}", tail(said)).into()),
        false => expect_output(said, "read "),
    }
}
