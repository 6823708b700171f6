//! Starts and stops the servers for the benchmark file.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::systems::{Export, Protocol, Server};
use crate::daemon::Daemon;
use crate::process::Process;
use crate::tgt::Tgt;
use crate::{Failure, sh};

/// Maximum time to wait for a server to start or exit.
const PATIENCE: Duration = Duration::from_secs(20);

/// Listen address of our target. This is different from the addresses used by other commands and
/// examples, so that they can run at the same time.
const LISTEN: &str = "127.44.0.1";

const IQN: &str = "iqn.2026-01.com.example:bench";

/// Maximum number of sessions allowed by our target.
const SESSIONS: usize = 256;

/// Directories used by servers.
pub(super) struct Place {
    /// Directory for sockets, logs and mount points.
    pub(super) scratch: PathBuf,
    /// Directory of riserd and riser.
    pub(super) programs: PathBuf,
}

/// Address of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Address {
    /// A file. If `direct` is set, fio should bypass the page cache.
    File { path: PathBuf, direct: bool },
    /// A URL as used by `riser`; fio uses the same format for NBD.
    Url(String),
}

/// Disks and their servers, which are stopped on drop.
pub(super) struct Served {
    /// One disk per file.
    pub(super) disks: Vec<Address>,
    /// An attached disk is before its target, because it must be stopped first.
    servers: Vec<Running>,
}

/// A server that is running.
enum Running {
    Program(Program),
    Tgt(Tgt),
    Daemon(Daemon),
}

impl Served {
    pub(super) fn processes(&self) -> Vec<u32> {
        let pid = |server: &Running| match server {
            Running::Program(program) => program.process.pid(),
            Running::Tgt(tgt) => tgt.pid(),
            Running::Daemon(daemon) => daemon.pid(),
        };
        self.servers.iter().map(pid).collect()
    }

    /// Stops the servers. Returns an error if our target doesn't exit with success.
    pub(super) fn stop(self) -> Result<(), Failure> {
        let mut servers = self.servers.into_iter();
        servers.try_for_each(|server| match server {
            Running::Daemon(daemon) => daemon.stop(),
            _ => Ok(()),
        })
    }
}

impl Place {
    /// Starts a server for the given files. Only our target supports more than one file, and
    /// exports each as a unit of the same target.
    pub(super) fn serve(&self, server: Server, images: &[PathBuf]) -> Result<Served, Failure> {
        let image = images.first().ok_or("missing file to serve")?;
        match server {
            Server::None => Ok(Served {
                disks: vec![Address::File {
                    path: image.clone(),
                    direct: false,
                }],
                servers: Vec::new(),
            }),
            Server::Nbdkit => self.nbd("nbdkit", |socket| {
                let mut command = sh::cmd("nbdkit", ["-f", "-U"]);
                command.arg(socket).arg("file").arg(image);
                command
            }),
            Server::QemuNbd => self.nbd("qemu-nbd", |socket| {
                let options = "-f raw --persistent --aio=io_uring --cache=writeback -e 64 -k";
                let mut command = sh::cmd("qemu-nbd", options.split(' '));
                command.arg(socket).arg(image);
                command
            }),
            Server::Tgt => {
                let tgt = Tgt::start(image, IQN, &self.scratch.join("tgt.log"))?;
                Ok(Served {
                    disks: vec![Address::Url(tgt.url().to_owned())],
                    servers: vec![Running::Tgt(tgt)],
                })
            }
            Server::Riserd(protocol) => self.riserd("roce", protocol, images),
            Server::Sharing => self.riserd("shm", Protocol::Srp, images),
            Server::Attached(export) => self.attached(export, images),
        }
    }

    fn nbd(&self, name: &str, command: impl FnOnce(&Path) -> Command) -> Result<Served, Failure> {
        let socket = self.scratch.join(format!("{name}.sock"));
        let _ = fs::remove_file(&socket);
        let log = self.scratch.join(format!("{name}.log"));
        let program = Program::start(command(&socket), &log, &socket)?;
        Ok(Served {
            disks: vec![Address::Url(nbd_url("", &socket))],
            servers: vec![Running::Program(program)],
        })
    }

    fn riserd(
        &self,
        provider: &str,
        protocol: Protocol,
        images: &[PathBuf],
    ) -> Result<Served, Failure> {
        let file = |image: &PathBuf| format!("{{ kind: file, path: {} }}", image.display());
        let disks: Vec<_> = images.iter().map(file).collect();
        self.start_riserd(provider, protocol, &disks)
    }

    fn start_riserd(
        &self,
        provider: &str,
        protocol: Protocol,
        disks: &[String],
    ) -> Result<Served, Failure> {
        let config = self.scratch.join("riserd.yaml");
        fs::write(&config, configuration(provider, disks, &self.scratch))?;
        let log = self.scratch.join("riserd.log");
        let daemon = Daemon::start(&self.programs.join("riserd"), &config, &log)?;
        let url = |lun| Address::Url(url(protocol, lun));
        Ok(Served {
            disks: (0..disks.len()).map(url).collect(),
            servers: vec![Running::Daemon(daemon)],
        })
    }

    /// Starts our target with units in memory, by their settings.
    pub(super) fn serve_memory(
        &self,
        protocol: Protocol,
        settings: &[String],
    ) -> Result<Served, Failure> {
        let disks: Vec<_> = settings
            .iter()
            .map(|settings| format!("{{ kind: ram, {settings} }}"))
            .collect();
        self.start_riserd("roce", protocol, &disks)
    }

    /// Attaches the first unit in the foreground, so that we know its process and can stop it when
    /// we exit.
    fn attached(&self, export: Export, images: &[PathBuf]) -> Result<Served, Failure> {
        let mut served = self.riserd("roce", Protocol::Srp, images)?;
        let (option, path) = match export {
            Export::Nbd => ("--nbd", self.scratch.join("attach.sock")),
            Export::Fuse => ("--fuse", self.scratch.join("mnt")),
        };
        let _ = fs::remove_file(&path);
        let mut command = self.riser(["attach", &url(Protocol::Srp, 0), "--foreground", option]);
        command.arg(&path);
        let (there, disk) = match export {
            Export::Nbd => (path.clone(), Address::Url(nbd_url("lun0", &path))),
            Export::Fuse => {
                fs::create_dir_all(&path)?;
                let file = path.join("lun0");
                let disk = Address::File {
                    path: file.clone(),
                    direct: true,
                };
                (file, disk)
            }
        };
        let mut program = Program::start(command, &self.scratch.join("attach.log"), &there)?;
        program.mount = (export == Export::Fuse).then_some(path);
        served.servers.insert(0, Running::Program(program));
        served.disks = vec![disk];
        Ok(served)
    }

    /// Attaches a disk `count` times and leaves it idle. Each attachment uses a separate process.
    pub(super) fn idle_sessions(
        &self,
        disk: &Address,
        count: usize,
    ) -> Result<Vec<Program>, Failure> {
        let Address::Url(url) = disk else {
            return Err(format!("{disk:?} has no sessions").into());
        };
        let mut sessions = Vec::new();
        for number in 0..count {
            // Use a separate directory for each process, because otherwise they would all be the
            // same initiator.
            let directory = self.scratch.join(format!("idle{number}"));
            fs::create_dir_all(&directory)?;
            let socket = directory.join("nbd.sock");
            let _ = fs::remove_file(&socket);
            let mut command = self.riser(["attach", url, "--foreground", "--nbd"]);
            command.arg(&socket);
            command.env("XDG_RUNTIME_DIR", &directory);
            command.env("RISER_STATE_DIR", directory.join("riser"));
            sessions.push(Program::start(
                command,
                &directory.join("attach.log"),
                &socket,
            )?);
        }
        Ok(sessions)
    }

    pub(super) fn riser<'a>(&self, args: impl IntoIterator<Item = &'a str>) -> Command {
        let mut command = sh::cmd(self.programs.join("riser"), args);
        command.env("XDG_RUNTIME_DIR", &self.scratch);
        command.env("RISER_STATE_DIR", self.scratch.join("riser"));
        command
    }
}

fn nbd_url(export: &str, socket: &Path) -> String {
    format!("nbd+unix:///{export}?socket={}", socket.display())
}

fn url(protocol: Protocol, lun: usize) -> String {
    match protocol {
        Protocol::Srp => format!("srp://{LISTEN}/{lun}"),
        Protocol::Iser => format!("iser://{LISTEN}/{IQN}/{lun}"),
        Protocol::Iscsi => format!("iscsi://{LISTEN}/{IQN}/{lun}"),
    }
}

/// Creates the configuration of a target with all protocols and a unit for each backend. We need to
/// allow all sessions to use the same address, because TCP sessions on one host do.
fn configuration(provider: &str, disks: &[String], scratch: &Path) -> String {
    let backend = |(lun, disk): (usize, &String)| format!("  disk{lun}: {disk}\n");
    let backends: String = disks.iter().enumerate().map(backend).collect();
    let luns = (0..disks.len()).map(|lun| format!("{lun}: disk{lun}"));
    let portals = ["srp", "iser", "iscsi"]
        .map(|protocol| format!("{{ protocol: {protocol}, listen: {LISTEN} }}"));
    format!(
        "backends:\n{backends}targets:\n  - name: bench\n    iqn: {IQN}\n    portals: [{}]\n    \
         luns: {{ {} }}\n    access: open\ntransport: {{ provider: {provider} }}\n\
         limits: {{ max_sessions: {SESSIONS}, sessions_per_address: {SESSIONS} }}\n\
         admin: {{ socket: none }}\nstate: {{ directory: {} }}\n",
        portals.join(", "),
        luns.collect::<Vec<_>>().join(", "),
        scratch.join("state").display()
    )
}

/// A server program that is stopped on drop.
pub(super) struct Program {
    process: Process,
    /// Directory mounted by this program.
    mount: Option<PathBuf>,
}

impl Program {
    /// Starts the program, writes its output to a file, and waits until the given path, such as a
    /// socket or a file, has been created.
    fn start(command: Command, log: &Path, path: &Path) -> Result<Self, Failure> {
        let process = Process::start(sh::ending_with_us(command, "TERM"), log)?;
        let mount = None;
        let mut program = Self { process, mount };
        program.process.wait_until(PATIENCE, |_| path.exists())?;
        Ok(program)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let status = self.process.stop(PATIENCE);
        // When a FUSE server is killed, its mount is left behind.
        if let (None, Some(mount)) = (status, &self.mount) {
            let _ = sh::output(sh::cmd("fusermount3", ["-u", "-z"]).arg(mount));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::curves::{CURVES, Curve, Vary};
    use super::*;

    #[test]
    fn target_has_unit_per_file() {
        let disks = ["/a", "/b"].map(|path| format!("{{ kind: file, path: {path} }}"));
        let text = configuration("shm", &disks, Path::new("/scratch"));
        for part in [
            "disk1: { kind: file, path: /b }",
            "luns: { 0: disk0, 1: disk1 }",
            "transport: { provider: shm }",
        ] {
            assert!(text.contains(part), "{text}");
        }
        // All sessions of a curve use the same address.
        let is_of_sessions = |curve: &&Curve| {
            matches!(
                curve.vary,
                Vary::IdleSessions | Vary::Sessions | Vary::Units
            )
        };
        let curves = CURVES.iter().filter(is_of_sessions);
        let most = curves
            .flat_map(|curve| &curve.xs)
            .copied()
            .fold(0.0, f64::max);
        assert!(most <= SESSIONS as f64, "{most}");
        assert!(text.contains("sessions_per_address: 256 }"), "{text}");
        assert_eq!(
            url(Protocol::Iser, 1),
            "iser://127.44.0.1/iqn.2026-01.com.example:bench/1"
        );
    }

    #[test]
    fn failed_server_start_shows_output() {
        let scratch = sh::Scratch::new("servers-test").unwrap();
        let command = sh::cmd("sh", ["-c", "echo no such plugin; exit 4"]);
        let socket = scratch.join("socket");
        let error = Program::start(command, &scratch.join("log"), &socket);
        let error = error.err().unwrap().to_string();
        assert!(
            error.contains("no such plugin") && error.contains('4'),
            "{error}"
        );
    }
}
