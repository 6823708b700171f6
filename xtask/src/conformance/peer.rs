//! `tgt`, the other user-space iSCSI target in Debian, as the peer beside which we are shown.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use super::suite::Run;
use super::{IQN, Options, SIZE, free_port, run_suite};
use crate::daemon::terminate;
use crate::packages::{Need, ensure, need};
use crate::{Failure, sh};

/// Number of the daemon's management socket, so that it meddles with no other.
const CONTROL: &str = "3917";

pub(super) const NEEDS: &[Need] = &[
    need("tgtd", "tgt", "the same run against tgt"),
    need("tgtadm", "tgt", "the same run against tgt"),
];

/// Runs the suite against the peer; nothing where that cannot be.
pub(super) fn run(options: &Options, scratch: &sh::Scratch) -> Option<Run> {
    if !ensure(NEEDS).is_empty() {
        return None;
    }
    let run = || -> Result<Run, Failure> {
        let tgt = Tgt::start(&scratch.join("tgt.img"), &scratch.join("tgt.log"))?;
        let tests = options.tests.as_deref().unwrap_or("ALL");
        let (run, ended) = run_suite(options, tests, &tgt.url(), scratch, "tgt")?;
        if let Some(how) = ended {
            println!("against tgt, iscsi-test-cu {how}");
        }
        Ok(run)
    };
    run()
        .inspect_err(|error| println!("tgt cannot be tried: {error}"))
        .ok()
}

/// A `tgtd` of our own; it is ended when the value goes.
pub(super) struct Tgt {
    child: Child,
    port: u16,
}

impl Tgt {
    /// Serves a file as LUN 1 to all initiators.
    fn start(image: &Path, log: &Path) -> Result<Self, Failure> {
        File::create(image)?.set_len(SIZE)?;
        let port = free_port()?;
        let out = File::create(log)?;
        let portal = format!("portal=127.0.0.1:{port}");
        let program = sh::which("tgtd").ok_or("tgtd is missing")?;
        let child = sh::cmd(program, ["-f", "-C", CONTROL, "--iscsi", &portal])
            .stdin(Stdio::null())
            .stdout(out.try_clone()?)
            .stderr(out)
            .spawn()?;
        let tgt = Self { child, port };
        let started = Instant::now();
        let target = ["--op", "new", "--mode", "target", "--tid", "1", "-T", IQN];
        // `tgtd` has no notification of its readiness, so the first command to it is repeated
        // until its control socket is there.
        while let Err(error) = tgt.manage(&target) {
            if started.elapsed() > Duration::from_secs(10) {
                return Err(error);
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        let lun = ["--mode", "logicalunit", "--tid", "1", "--lun", "1"];
        let file = image.display().to_string();
        tgt.manage(&[&["--op", "new", "-b", &file], &lun[..]].concat())?;
        let thin = ["--op", "update", "--params", "thin_provisioning=1"];
        tgt.manage(&[&thin, &lun[..]].concat())?;
        tgt.manage(&[
            "--op", "bind", "--mode", "target", "--tid", "1", "-I", "ALL",
        ])?;
        Ok(tgt)
    }

    fn manage(&self, args: &[&str]) -> Result<(), Failure> {
        let mut command = sh::cmd("tgtadm", ["-C", CONTROL, "--lld", "iscsi"]);
        sh::output(command.args(args)).map(|_| ())
    }

    fn url(&self) -> String {
        format!("iscsi://127.0.0.1:{}/{IQN}/1", self.port)
    }
}

impl Drop for Tgt {
    fn drop(&mut self) {
        terminate(self.child.id());
        let asked = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) {
            if asked.elapsed() > Duration::from_secs(3) {
                let _ = self.child.kill();
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}
