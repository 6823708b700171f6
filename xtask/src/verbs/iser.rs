//! Storage over iSER with programs of others on our libraries: tgt as a target, libiscsi's tools and
//! QEMU as clients, with `riserd` and `riser` and with each other, and what happens when one side is
//! killed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use super::runner::{Ended, Process, Rig, failure, status, tail};
use crate::daemon::Daemon;
use crate::tgt::free_port;
use crate::{Failure, sh};

/// Address of the target; the client has the next one, and `riser` that after it.
const SERVER: &str = "127.0.19.1";
const CLIENT: &str = "127.0.19.2";
const RISER: &str = "127.0.19.3";

/// Names of the targets.
const OF_TGT: &str = "iqn.2026-01.org.example:tgt";
const OF_RISERD: &str = "iqn.2026-01.org.example:riserd";

/// Name of the initiator that `riser` is here.
const INITIATOR: &str = "iqn.2026-01.org.example:riser";

/// Names of those that tgt lets in: over iSER it wants a list of them.
const INITIATORS: [&str; 5] = [
    INITIATOR,
    "iqn.2007-10.com.github:sahlberg:libiscsi:iscsi-inq",
    "iqn.2010-11.libiscsi:iscsi-perf",
    "iqn.2007-10.com.github:sahlberg:libiscsi:iscsi-readcapacity16",
    "iqn.2008-11.org.linux-kvm",
];

/// Bytes of a disk.
const SIZE: u64 = 32 << 20;

/// Longest time of a program, unless it says otherwise.
const PATIENCE: Duration = Duration::from_secs(30);

/// Longest time for a target to serve.
const START: Duration = Duration::from_secs(20);

/// One case: its name, the programs that it needs beside ours, and what it does.
pub(super) struct Case {
    pub(super) name: &'static str,
    pub(super) needs: &'static [&'static str],
    run: fn(&Stage<'_>) -> Result<(), Failure>,
}

impl Case {
    /// Name with its group.
    pub(super) fn path(&self) -> String {
        format!("iser/{}", self.name)
    }

    /// Runs it; answers its time.
    pub(super) fn run(&self, rig: &Rig, programs: &Path) -> Result<Duration, Failure> {
        let began = Instant::now();
        let stage = Stage {
            rig,
            programs,
            folder: rig.folder("iser")?,
            case: self.path(),
        };
        (self.run)(&stage)?;
        Ok(began.elapsed())
    }
}

const LIBISCSI: [&str; 3] = ["iscsi-inq", "iscsi-readcapacity16", "iscsi-perf"];

pub(super) const CASES: &[Case] = &[
    Case {
        name: "riser, tgt",
        needs: &["tgtd", "tgtadm"],
        run: riser_and_tgt,
    },
    Case {
        name: "riser, tgt is killed",
        needs: &["tgtd", "tgtadm"],
        run: tgt_is_killed,
    },
    Case {
        name: "libiscsi, riserd",
        needs: &LIBISCSI,
        run: |stage| stage.libiscsi(&stage.riserd()?.1),
    },
    Case {
        name: "libiscsi, tgt",
        needs: &[
            "tgtd",
            "tgtadm",
            "iscsi-inq",
            "iscsi-readcapacity16",
            "iscsi-perf",
        ],
        run: |stage| {
            let tgt = stage.tgt("tgtd")?;
            stage.libiscsi(&tgt.url())?;
            tgt.stop()
        },
    },
    Case {
        name: "libiscsi, riserd is killed",
        needs: &[
            "qemu-img",
            "qemu-io",
            "iscsi-inq",
            "iscsi-readcapacity16",
            "iscsi-perf",
        ],
        run: riserd_is_killed,
    },
    Case {
        name: "QEMU, riserd",
        needs: &["qemu-img", "qemu-io"],
        run: qemu_and_riserd,
    },
    Case {
        name: "QEMU, tgt",
        needs: &["tgtd", "tgtadm", "qemu-img", "qemu-io"],
        run: qemu_and_tgt,
    },
];

/// A case that runs.
struct Stage<'a> {
    rig: &'a Rig,
    programs: &'a Path,
    /// A folder that processes may write.
    folder: PathBuf,
    case: String,
}

impl Stage<'_> {
    /// Starts a program, whose output goes to a log with this name.
    fn start(&self, command: Command, name: &str) -> Result<Process, Failure> {
        self.rig.start(command, &format!("{}.{name}", self.case))
    }

    /// Runs a program of others on our libraries to its successful end; answers its output.
    fn client(&self, words: &[&str]) -> Result<String, Failure> {
        let command = self.rig.command(CLIENT, &[], words);
        self.end(command, words[0], PATIENCE)
    }

    /// Runs `riser` likewise, on its own software NIC.
    fn riser(&self, words: &[&str]) -> Result<String, Failure> {
        self.end(self.riser_command(words), words[0], PATIENCE)
    }

    fn riser_command(&self, words: &[&str]) -> Command {
        let mut command = sh::cmd(self.rig.riser(), words);
        command.args(["--addr", RISER]);
        self.rig.without_rights(&command, None)
    }

    fn end(&self, command: Command, name: &str, time: Duration) -> Result<String, Failure> {
        let mut process = self.start(command, name)?;
        succeed(name, &process.end(Instant::now() + time))
    }

    /// A file of bytes that differ from block to block, for processes to read.
    fn pattern(&self, name: &str, length: usize) -> Result<(PathBuf, Vec<u8>), Failure> {
        let bytes: Vec<u8> = (0..length)
            .map(|i| (i as u32).wrapping_mul(0x9e37_79b1).to_be_bytes()[i % 4])
            .collect();
        let path = self.folder.join(name);
        fs::write(&path, &bytes)?;
        Ok((path, bytes))
    }

    /// An empty disk, if it is not there.
    fn disk(&self) -> Result<PathBuf, Failure> {
        let path = self.folder.join("disk");
        if !path.exists() {
            fs::File::create(&path)?.set_len(SIZE)?;
            self.rig.hand_over(&path)?;
        }
        Ok(path)
    }

    /// A `riserd` that serves the disk over iSER, and the disk's address.
    fn riserd(&self) -> Result<(Daemon, String), Failure> {
        let config = self.folder.join("riserd.yaml");
        // libiscsi sends no more than 256 KiB with one command over iSER, and QEMU asks the target.
        let text = format!(
            "backends:\n  disk: {{ kind: file, path: {} }}\n\
             limits: {{ max_transfer: 256KiB }}\n\
             targets:\n  - name: riserd\n    iqn: {OF_RISERD}\n    \
             portals: [{{ protocol: iser, listen: \"{SERVER}:3260\" }}]\n    \
             luns: {{ 0: disk }}\n    access: open\nadmin: {{ socket: none }}\n",
            self.disk()?.display()
        );
        fs::write(&config, text)?;
        let log = self.folder.join("riserd.log");
        let daemon = Daemon::start(&self.programs.join("riserd"), &config, &log)?;
        Ok((daemon, format!("iser://{SERVER}:3260/{OF_RISERD}/0")))
    }

    /// A `tgtd` that serves the disk as LUN 1 over iSER.
    fn tgt(&self, log: &str) -> Result<Tgt<'_>, Failure> {
        Tgt::start(self, log)
    }

    /// libiscsi's tools at a target of our size.
    fn libiscsi(&self, url: &str) -> Result<(), Failure> {
        says(&self.client(&["iscsi-inq", url])?, "Vendor:")?;
        let said = self.client(&["iscsi-readcapacity16", url])?;
        says(&said, &format!("Total size:{SIZE}"))?;
        let said = self.client(&["iscsi-perf", "-t", "2", "-r", url])?;
        says(&said, "iops average")
    }
}

/// A `tgtd` on our libraries. It is killed when the value goes.
struct Tgt<'a> {
    stage: &'a Stage<'a>,
    process: Process,
}

impl<'a> Tgt<'a> {
    fn start(stage: &'a Stage<'a>, log: &str) -> Result<Self, Failure> {
        let disk = stage.disk()?;
        // The RDMA port is 3260 always, and there is a TCP port as well.
        let portal = format!("portal={SERVER}:{}", free_port()?);
        let words = ["tgtd", "-f", "--iser", "pool_sz_mb=32", "--iscsi", &portal];
        let mut command = stage.rig.command(SERVER, &[], &words);
        command.env("TGT_IPC_SOCKET", stage.folder.join("ipc"));
        let process = stage.start(command, log)?;
        let mut tgt = Self { stage, process };
        let target = ["target", "--op", "new", "--tid", "1", "-T", OF_TGT];
        let started = Instant::now();
        // It has no notification of its readiness, so the first command to it is repeated until its
        // socket is there.
        while let Err(error) = tgt.manage(&target) {
            if started.elapsed() > START || tgt.process.has_ended()? {
                let said = tgt.process.end(Instant::now()).said;
                return Err(format!("{error}\n{}", tail(&said)).into());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
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

    /// Runs `tgtadm` in a mode. It has to be the same user's.
    fn manage(&self, words: &[&str]) -> Result<(), Failure> {
        let command = sh::cmd("tgtadm", ["--lld", "iser", "--mode"].iter().chain(words));
        let mut command = self.stage.rig.without_rights(&command, None);
        command.env("TGT_IPC_SOCKET", self.stage.folder.join("ipc"));
        sh::output(&mut command).map(drop)
    }

    /// Ends it as its manual says, so that it gives all back to the library. That takes a target
    /// without sessions: it dies where it has to end an iSER session by force.
    fn stop(mut self) -> Result<(), Failure> {
        let started = Instant::now();
        while let Err(error) = self.manage(&["target", "--op", "delete", "--tid", "1"]) {
            if started.elapsed() > START {
                return Err(error);
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        self.manage(&["system", "--op", "delete"])?;
        succeed("tgtd", &self.process.end(Instant::now() + START)).map(drop)
    }
}

/// Whether QEMU's tools have their driver, which is not installed here: it has to be of the tools'
/// version, as `cargo xtask conformance` installs it.
pub(super) fn has_qemu_driver() -> bool {
    // No target is at this port. A QEMU of before 8 reports an unknown protocol, a newer one a
    // module that it cannot load.
    let unserved = "iscsi://127.0.0.1:1/iqn.2026-01.org.example:none/0";
    let answer = sh::output(&mut sh::cmd("qemu-img", ["info", unserved]));
    answer.is_err_and(|error| {
        let error = error.to_string();
        !error.contains("Unknown protocol") && !error.contains("Unable to load module")
    })
}

/// Output of a program that has succeeded.
fn succeed(name: &str, ended: &Ended) -> Result<String, Failure> {
    let status = status(name, ended)?;
    match status.success() {
        true => Ok(ended.said.clone()),
        false => Err(failure(name, &status.to_string(), ended)),
    }
}

fn says(said: &str, words: &str) -> Result<(), Failure> {
    match said.contains(words) {
        true => Ok(()),
        false => Err(format!("does not say {words:?}\n{}", tail(said)).into()),
    }
}

/// Address at tgt for `riser`, which tgt knows by its name.
fn with_name(url: &str) -> String {
    format!("{url}?initiator={INITIATOR}")
}

/// Discovery, a copy to the disk and back, and verified I/O of all sizes.
fn riser_and_tgt(stage: &Stage<'_>) -> Result<(), Failure> {
    let tgt = stage.tgt("tgtd")?;
    let found = stage.riser(&["discover", &with_name(&format!("iser://{SERVER}"))])?;
    says(&found, OF_TGT)?;
    let url = with_name(&tgt.url());
    says(&stage.riser(&["inquiry", &url])?, "IET")?;
    // No multiple of what goes with one command.
    let (first, bytes) = stage.pattern("first", (9 << 20) + 4096)?;
    let first = first.display().to_string();
    stage.riser(&["write", &url, &first, "--offset", "1MiB"])?;
    if fs::read(stage.disk()?)?[1 << 20..][..bytes.len()] != bytes {
        return Err("what riser wrote is not in tgt's file".into());
    }
    let second = stage.folder.join("second");
    let to = second.display().to_string();
    let length = bytes.len().to_string();
    stage.riser(&["read", &url, &to, "--offset", "1MiB", "--length", &length])?;
    if fs::read(second)? != bytes {
        return Err("what riser read is not what it wrote".into());
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

/// A `tgtd` that is killed during verified I/O, and one in its place: no write may be lost.
fn tgt_is_killed(stage: &Stage<'_>) -> Result<(), Failure> {
    let tgt = stage.tgt("tgtd")?;
    let url = with_name(&tgt.url());
    let words = ["bench", &url, "--overwrite", "--rw=randrw", "--verify"];
    let words = [&words[..], &["--runtime=4s", "--warm-up=0s"]].concat();
    let mut bench = stage.start(stage.riser_command(&words), "bench")?;
    std::thread::sleep(Duration::from_secs(1));
    if bench.has_ended()? {
        return succeed("riser bench", &bench.end(Instant::now())).map(drop);
    }
    drop(tgt);
    let tgt = stage.tgt("tgtd again")?;
    succeed("riser bench", &bench.end(Instant::now() + 2 * PATIENCE))?;
    tgt.stop()
}

/// A `riserd` that is killed under a client of libiscsi: the library reports it to the client, and
/// another client is served by the next `riserd`. The first one does not come back, since libiscsi
/// 1.19 connects again over TCP.
fn riserd_is_killed(stage: &Stage<'_>) -> Result<(), Failure> {
    let (daemon, url) = stage.riserd()?;
    let words = [
        "env",
        "LIBISCSI_DEBUG=2",
        "qemu-io",
        "-f",
        "raw",
        "-c",
        "write 0 64k",
        "-c",
        "sleep 3000",
        "-c",
        "read 0 64k",
        &url,
    ];
    let client = stage.rig.command(CLIENT, &[], &words);
    let client = stage.start(client, "qemu-io")?;
    client.await_words("wrote 65536/65536", PATIENCE)?;
    drop(daemon);
    let (daemon, url) = stage.riserd()?;
    client.await_words("reconnect initiated", PATIENCE)?;
    drop(client);
    stage.libiscsi(&url)?;
    daemon.stop()
}

/// An image goes in and is the same, and one changed byte is found; single writes and reads.
fn qemu_and_riserd(stage: &Stage<'_>) -> Result<(), Failure> {
    let (daemon, url) = stage.riserd()?;
    let (image, bytes) = stage.pattern("image", SIZE as usize)?;
    let image = image.display().to_string();
    let raw = ["-f", "raw"];
    let convert = [
        "qemu-img", "convert", "-n", "-f", "raw", "-O", "raw", &image, &url,
    ];
    stage.client(&convert)?;
    // Beside the comparison by the same client: one that wrote and read at the same wrong place
    // would find its data equal.
    if fs::read(stage.disk()?)? != bytes {
        return Err("what qemu-img wrote is not in riserd's file".into());
    }
    let compare = [
        "qemu-img", "compare", "-f", "raw", "-F", "raw", &image, &url,
    ];
    says(&stage.client(&compare)?, "identical")?;
    let write = ["-c", "write -P 0x5a 1M 256k", "-c", "flush"];
    let read = ["-c", "read -P 0x5a 1M 256k", "-c", "read 0 32M"];
    let words = [&["qemu-io"], &raw[..], &write, &read, &[&url]].concat();
    is_verified(&stage.client(&words)?)?;
    if stage.client(&compare).is_ok() {
        return Err("qemu-img finds different images identical".into());
    }
    daemon.stop()
}

/// Single writes and reads: tgt does not say how long a transfer may be, so QEMU cannot copy.
fn qemu_and_tgt(stage: &Stage<'_>) -> Result<(), Failure> {
    let tgt = stage.tgt("tgtd")?;
    let url = tgt.url();
    says(
        &stage.client(&["qemu-img", "info", &url])?,
        &format!("({SIZE} bytes)"),
    )?;
    let words = [
        "qemu-io",
        "-f",
        "raw",
        "-c",
        "write -P 0x5a 1M 256k",
        "-c",
        "flush",
        "-c",
        "read -P 0x5a 1M 256k",
        "-c",
        "read -P 0 0 256k",
        &url,
    ];
    is_verified(&stage.client(&words)?)?;
    tgt.stop()
}

/// `qemu-io` succeeds also where a pattern is not there.
fn is_verified(said: &str) -> Result<(), Failure> {
    match said.contains("failed") {
        true => Err(format!("qemu-io:\n{}", tail(said)).into()),
        false => says(said, "read "),
    }
}
