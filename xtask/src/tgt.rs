//! Runs a `tgtd` instance for comparison. This is the other user-space iSCSI target included in
//! Debian.

use std::net::TcpListener;
use std::path::Path;
use std::time::Duration;

use crate::process::Process;
use crate::{Failure, sh};

/// Number of the daemon's management socket, set so that we don't conflict with another instance.
const CONTROL: &str = "3917";

/// The only unit with data, because `tgtd` creates a controller as LUN 0.
const UNIT: [&str; 6] = ["--mode", "logicalunit", "--tid", "1", "--lun", "1"];

/// Maximum time to start and to stop.
const START: Duration = Duration::from_secs(10);
const STOP: Duration = Duration::from_secs(3);

/// A running `tgtd`. The daemon will be stopped on drop.
pub(crate) struct Tgt {
    process: Process,
    url: String,
}

impl Tgt {
    /// Exports an existing file as LUN 1 of a target, to all initiators.
    pub(crate) fn start(image: &Path, iqn: &str, log: &Path) -> Result<Self, Failure> {
        let port = free_port()?;
        let portal = format!("portal=127.0.0.1:{port}");
        let program = sh::which("tgtd").ok_or("tgtd is missing")?;
        let command = sh::cmd(program, ["-f", "-C", CONTROL, "--iscsi", &portal]);
        // SIGTERM may not stop this daemon.
        let process = Process::start(sh::ending_with_us(command, "KILL"), log)?;
        let url = format!("iscsi://127.0.0.1:{port}/{iqn}/1");
        let mut tgt = Self { process, url };
        let target = ["--op", "new", "--mode", "target", "--tid", "1", "-T", iqn];
        // `tgtd` has no ready notification, so we retry the first command until the control socket
        // is available.
        tgt.process.wait_until(START, |_| manage(&target).is_ok())?;
        let file = image.display().to_string();
        manage(&[&["--op", "new", "-b", &file], &UNIT[..]].concat())?;
        manage(&[
            "--op", "bind", "--mode", "target", "--tid", "1", "-I", "ALL",
        ])?;
        Ok(tgt)
    }

    /// Updates parameters of the unit, for example `thin_provisioning=1`.
    pub(crate) fn update(&self, params: &str) -> Result<(), Failure> {
        manage(&[&["--op", "update", "--params", params], &UNIT[..]].concat())
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.pid()
    }
}

fn manage(args: &[&str]) -> Result<(), Failure> {
    let mut command = sh::cmd("tgtadm", ["-C", CONTROL, "--lld", "iscsi"]);
    sh::output(command.args(args)).map(|_| ())
}

/// Returns a TCP port on 127.0.0.1 that is currently unused.
pub(crate) fn free_port() -> Result<u16, Failure> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    Ok(listener.local_addr()?.port())
}

impl Drop for Tgt {
    fn drop(&mut self) {
        self.process.stop(STOP);
    }
}
