//! Servers of the file: started, waited for and ended.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::systems::{Export, Protocol, Server};
use crate::daemon::{Daemon, terminate};
use crate::tgt::Tgt;
use crate::{Failure, sh};

/// Longest time for a server to be usable, or to be gone.
const PATIENCE: Duration = Duration::from_secs(20);

/// Address of our target: not that of the other commands and examples, so that they can run
/// meanwhile.
const LISTEN: &str = "127.44.0.1";

const IQN: &str = "iqn.2026-01.com.example:bench";

/// Sessions that our target admits.
const SESSIONS: usize = 256;

/// Where servers find programs and leave files.
pub(super) struct Place {
    /// Folder of sockets, logs and mount points.
    pub(super) scratch: PathBuf,
    /// Folder of riserd and riser.
    pub(super) programs: PathBuf,
}

/// Way to a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Address {
    /// A file, and whether fio is to pass by the page cache.
    File { path: PathBuf, direct: bool },
    /// An address as `riser` takes it; NBD's is fio's as well.
    Url(String),
}

/// Disks that are served until the value goes.
pub(super) struct Served {
    /// A disk for each file.
    pub(super) disks: Vec<Address>,
    // Ended in this order: what is attached before its target.
    program: Option<Program>,
    tgt: Option<Tgt>,
    daemon: Option<Daemon>,
}

impl Served {
    fn at(disk: Address) -> Self {
        Self {
            disks: vec![disk],
            program: None,
            tgt: None,
            daemon: None,
        }
    }

    /// Process ids of all servers.
    pub(super) fn processes(&self) -> Vec<u32> {
        let program = self.program.as_ref().map(|program| program.child.id());
        let tgt = self.tgt.as_ref().map(Tgt::pid);
        let daemon = self.daemon.as_ref().map(Daemon::pid);
        program.into_iter().chain(tgt).chain(daemon).collect()
    }

    /// Ends the servers; fails where our target does not end well.
    pub(super) fn stop(mut self) -> Result<(), Failure> {
        drop(self.program.take());
        drop(self.tgt.take());
        self.daemon.take().map_or(Ok(()), Daemon::stop)
    }
}

impl Place {
    /// Serves files. Only our target takes more than one, as units of one target.
    pub(super) fn serve(&self, server: Server, images: &[PathBuf]) -> Result<Served, Failure> {
        let image = images.first().ok_or("there is no file to serve")?;
        match server {
            Server::None => Ok(Served::at(Address::File {
                path: image.clone(),
                direct: false,
            })),
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
                let mut served = Served::at(Address::Url(tgt.url().to_owned()));
                served.tgt = Some(tgt);
                Ok(served)
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
        let program = Program::start(command(&socket), &log)?.once_there(&socket)?;
        let mut served = Served::at(Address::Url(nbd_url("", &socket)));
        served.program = Some(program);
        Ok(served)
    }

    fn riserd(
        &self,
        provider: &str,
        protocol: Protocol,
        images: &[PathBuf],
    ) -> Result<Served, Failure> {
        let config = self.scratch.join("riserd.yaml");
        fs::write(&config, configuration(provider, images, &self.scratch))?;
        let log = self.scratch.join("riserd.log");
        let daemon = Daemon::start(&self.programs.join("riserd"), &config, &log)?;
        let url = |lun| Address::Url(url(protocol, lun));
        Ok(Served {
            disks: (0..images.len()).map(url).collect(),
            program: None,
            tgt: None,
            daemon: Some(daemon),
        })
    }

    /// Attaches the first unit in the foreground, so that the process is known and ends with us.
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
        let mut program = Program::start(command, &self.scratch.join("attach.log"))?;
        program.mount = (export == Export::Fuse).then_some(path);
        served.program = Some(program.once_there(&there)?);
        served.disks = vec![disk];
        Ok(served)
    }

    /// Attaches a disk that many times, each by a process of its own, which then has nothing to do.
    pub(super) fn idle_sessions(&self, disk: &Address, count: usize) -> Result<Idle, Failure> {
        let Address::Url(url) = disk else {
            return Err(format!("{disk:?} has no sessions").into());
        };
        let mut sessions = Vec::new();
        for number in 0..count {
            // A folder of its own, or they would be one initiator.
            let folder = self.scratch.join(format!("idle{number}"));
            fs::create_dir_all(&folder)?;
            let socket = folder.join("nbd.sock");
            let _ = fs::remove_file(&socket);
            let mut command = self.riser(["attach", url, "--foreground", "--nbd"]);
            command.arg(&socket);
            command.env("XDG_RUNTIME_DIR", &folder);
            command.env("RISER_STATE_DIR", folder.join("riser"));
            let program = Program::start(command, &folder.join("attach.log"))?;
            sessions.push(program.once_there(&socket)?);
        }
        Ok(Idle {
            _sessions: sessions,
        })
    }

    /// `riser`, with its files in the scratch folder.
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

/// A target by all protocols, with a unit for each file. All sessions may come from one address, as
/// those of TCP on one host do.
fn configuration(provider: &str, images: &[PathBuf], scratch: &Path) -> String {
    let backend = |(lun, image): (usize, &PathBuf)| {
        format!("  disk{lun}: {{ kind: file, path: {} }}\n", image.display())
    };
    let backends: String = images.iter().enumerate().map(backend).collect();
    let luns = (0..images.len()).map(|lun| format!("{lun}: disk{lun}"));
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

/// Sessions without commands, which end with the value.
pub(super) struct Idle {
    _sessions: Vec<Program>,
}

/// A program that serves until the value goes.
struct Program {
    child: Child,
    name: String,
    log: PathBuf,
    /// Directory that it has mounted.
    mount: Option<PathBuf>,
}

impl Program {
    /// Starts it, with its output in a file.
    fn start(command: Command, log: &Path) -> Result<Self, Failure> {
        let name = command.get_program().to_string_lossy().into_owned();
        let out = File::create(log)?;
        let child = sh::ending_with_us(command, "TERM")
            .stdin(Stdio::null())
            .stdout(out.try_clone()?)
            .stderr(out)
            .spawn()
            .map_err(|e| format!("{name}: {e}"))?;
        Ok(Self {
            child,
            name,
            log: log.to_path_buf(),
            mount: None,
        })
    }

    /// Waits until a path is there, its socket or its file.
    fn once_there(mut self, path: &Path) -> Result<Self, Failure> {
        let started = Instant::now();
        while !path.exists() {
            let ended = self.child.try_wait()?;
            if ended.is_some() || started.elapsed() > PATIENCE {
                let how = ended.map_or("is not ready".to_owned(), |status| status.to_string());
                let said = fs::read_to_string(&self.log).unwrap_or_default();
                return Err(format!("{}: {how}\n{}", self.name, said.trim_end()).into());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(self)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // The id of one that has been waited for may be another's by now.
        if !matches!(self.child.try_wait(), Ok(None)) {
            return;
        }
        terminate(self.child.id());
        let asked = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) {
            if asked.elapsed() > PATIENCE {
                let _ = self.child.kill();
                // A killed server of FUSE leaves its mount behind.
                if let Some(mount) = &self.mount {
                    let _ = sh::output(sh::cmd("fusermount3", ["-u", "-z"]).arg(mount));
                }
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::curves::{CURVES, Curve, Vary};
    use super::*;

    #[test]
    fn a_target_has_a_unit_for_each_file() {
        let images = ["/a", "/b"].map(PathBuf::from);
        let text = configuration("shm", &images, Path::new("/scratch"));
        for part in [
            "disk1: { kind: file, path: /b }",
            "luns: { 0: disk0, 1: disk1 }",
            "transport: { provider: shm }",
        ] {
            assert!(text.contains(part), "{text}");
        }
        // All sessions of a curve come from one address.
        let is_of_sessions = |curve: &&Curve| {
            matches!(
                curve.vary,
                Vary::IdleSessions | Vary::Sessions | Vary::Units
            )
        };
        let curves = CURVES.iter().filter(is_of_sessions);
        let most = curves
            .flat_map(|curve| curve.xs)
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
    fn a_server_that_ends_at_its_start_is_reported_with_what_it_said() {
        let scratch = sh::Scratch::new("servers-test").unwrap();
        let command = sh::cmd("sh", ["-c", "echo no such plugin; exit 4"]);
        let program = Program::start(command, &scratch.join("log")).unwrap();
        let error = program.once_there(&scratch.join("socket")).err().unwrap();
        let error = error.to_string();
        assert!(
            error.contains("no such plugin") && error.contains('4'),
            "{error}"
        );
    }
}
