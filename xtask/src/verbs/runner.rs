//! Runs a test case. The server and all clients use `riser run` and are unprivileged.

use std::fs::{self, Permissions};
use std::net::Ipv4Addr;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::cases::{ADMINISTRATOR, Case, IBACM, Ready};
use super::namespace::{ADDRESSES, Namespace};
use crate::process::{Exited, POLL_INTERVAL, Process};
use crate::{Failure, sh};

/// Unprivileged user and group ID: `nobody` and `nogroup` in Debian.
const NOBODY: u32 = 65_534;

/// Server address. The clients use the next addresses.
const SERVER: [u8; 4] = [127, 0, 17, 1];

/// First port used for cases.
const FIRST_PORT: usize = 21_000;

/// A server that is listening must sleep for this time. Also used as the delay between starting
/// clients.
const SETTLE: Duration = Duration::from_secs(1);

/// If a server never sleeps, we assume that it's listening after this time.
const BUSY: Duration = Duration::from_secs(3);

/// Maximum time for a server to get ready, and to exit after its clients.
const PATIENCE: Duration = Duration::from_secs(10);

/// The programs to test, copied to a location that an unprivileged user can read.
pub(crate) struct Rig {
    riser: PathBuf,
    /// `libriser_drop_in.so`.
    library: PathBuf,
    /// Directory that the programs were copied from.
    programs: PathBuf,
    /// Directory of the copies.
    copies: PathBuf,
    /// Directory that is writable for test processes.
    home: PathBuf,
    logs: PathBuf,
    /// Network namespace for cases with `network`, or the error if it can't be created.
    /// This is initialized on first use.
    network: OnceLock<Result<Namespace, String>>,
}

impl Rig {
    /// Copies the programs from a directory, because an unprivileged user may not be able to access
    /// the source directory.
    pub(crate) fn new(
        programs: &Path,
        scratch: &sh::Scratch,
        logs: &Path,
    ) -> Result<Self, Failure> {
        fs::create_dir_all(logs)?;
        fs::set_permissions(scratch.path(), Permissions::from_mode(0o755))?;
        let copy = |name: &str| copy(&programs.join(name), scratch.path());
        let home = scratch.join("home");
        fs::create_dir_all(&home)?;
        let rig = Self {
            riser: copy("riser")?,
            library: copy("libriser_drop_in.so")?,
            programs: programs.to_owned(),
            copies: scratch.path().to_owned(),
            home,
            logs: logs.to_owned(),
            network: OnceLock::new(),
        };
        rig.make_private(&rig.home)?;
        Ok(rig)
    }

    /// Copies a program so that test processes can run it.
    ///
    /// # Errors
    /// Returns an error if the program doesn't exist or can't be copied.
    pub(super) fn adopt(&self, program: &Path) -> Result<PathBuf, Failure> {
        copy(program, &self.copies)
    }

    /// Changes the owner of a directory to the user of test processes.
    fn make_private(&self, directory: &Path) -> Result<(), Failure> {
        fs::set_permissions(directory, Permissions::from_mode(0o700))?;
        self.hand_over(directory)
    }

    pub(super) fn riser(&self) -> &Path {
        &self.riser
    }

    /// Changes the owner of a file to the user of test processes.
    pub(super) fn hand_over(&self, file: &Path) -> Result<(), Failure> {
        if sh::is_root() {
            chown(file, Some(NOBODY), Some(NOBODY))?;
        }
        Ok(())
    }

    pub(super) fn directory(&self, name: &str) -> Result<PathBuf, Failure> {
        let directory = self.home.join(name);
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir_all(&directory)?;
        self.make_private(&directory)?;
        Ok(directory)
    }

    /// Returns the namespaces with a network interface, which are created on first use.
    ///
    /// # Errors
    /// Returns an error if users are not allowed to create namespaces by the kernel or the
    /// container.
    pub(super) fn network(&self) -> Result<&Namespace, String> {
        let made = self.network.get_or_init(|| {
            let make = || {
                let directory = self.directory("dev")?;
                let as_user = |command| self.as_user(sh::ending_with_us(command, "KILL"), None);
                Namespace::new(as_user, &directory, &self.logs.join("namespace.log"))
            };
            make().map_err(|why: Failure| why.to_string())
        });
        made.as_ref().map_err(Clone::clone)
    }

    /// Returns a command that uses `riser run` with devices for the given addresses and additional
    /// options.
    pub(crate) fn command(&self, addr: &str, options: &[&str], words: &[&str]) -> Command {
        self.command_at(None, addr, options, words)
    }

    /// Same as [`Rig::command`], but runs in the namespaces with a network interface.
    pub(super) fn command_at(
        &self,
        network: Option<&Namespace>,
        addr: &str,
        options: &[&str],
        words: &[&str],
    ) -> Command {
        let mut run = sh::cmd(&self.riser, ["run", "--addr", addr]);
        run.args(options).arg("--").args(words);
        self.without_rights(&run, network)
    }

    /// Returns a command that runs as an unprivileged user and, if given, in the namespaces with a
    /// network interface.
    pub(super) fn without_rights(&self, run: &Command, network: Option<&Namespace>) -> Command {
        // Use line buffering, so that we see the output immediately even if it's not a terminal.
        let run = sh::behind(sh::cmd("stdbuf", ["-oL"]), run);
        // This must be the innermost wrapper, because the signal would be reset when we change the
        // user.
        self.as_user(sh::ending_with_us(run, "KILL"), network)
    }

    /// Returns a command that runs as an unprivileged user if we are root.
    fn as_user(&self, run: Command, network: Option<&Namespace>) -> Command {
        let run = match network {
            Some(network) => network.enter(&self.home, &run),
            None => run,
        };
        let mut run = match sh::is_root() {
            false => run,
            true => {
                let user = NOBODY.to_string();
                let drop = [
                    "--reuid",
                    &user,
                    "--regid",
                    &user,
                    "--clear-groups",
                    "--bounding-set=-all",
                    "--inh-caps=-all",
                    "--no-new-privs",
                    "--",
                ];
                sh::behind(sh::cmd("setpriv", drop), &run)
            }
        };
        run.env("RISER_DROP_IN", &self.library)
            .env("TMPDIR", &self.home)
            .env("HOME", &self.home)
            .env_remove("XDG_RUNTIME_DIR")
            .current_dir(&self.home);
        run
    }

    pub(crate) fn start(&self, command: Command, log: &str) -> Result<Process, Failure> {
        Process::start(command, &self.logs.join(format!("{}.log", file_name(log))))
    }

    pub(super) fn run(&self, number: usize, case: &Case) -> Result<(), Failure> {
        let until = Instant::now() + Duration::from_secs(case.seconds);
        let port = (FIRST_PORT + number).to_string();
        let dir = self.directory("case")?;
        let network = match case.network {
            false => None,
            true => Some(self.network()?),
        };
        let address = |number: usize| match case.network {
            false => address(number),
            true => ADDRESSES[number].to_string(),
        };
        if let Some(config) = &case.config {
            let config = config.replace("{server}", &address(0));
            fs::write(dir.join("riserd.yaml"), config)?;
            self.adopt(&self.programs.join("riserd"))?;
        }
        if case
            .commands()
            .any(|command| command.contains(ADMINISTRATOR))
        {
            self.adopt(&self.programs.join(ADMINISTRATOR))?;
        }
        if let Some(source) = &case.source {
            compile(source, &dir.join("program"))?;
        }
        fs::write(dir.join(IBACM), include_str!("ibacm.py"))?;
        let words = |command: &str, client: usize| {
            let command = command
                .replace("{server}", &address(0))
                .replace("{client}", &address(client))
                .replace("{port}", &port)
                .replace("{dir}", &dir.display().to_string())
                .replace("{programs}", &self.copies.display().to_string());
            let words = command.split(' ').filter(|word| !word.is_empty());
            words.map(str::to_owned).collect::<Vec<_>>()
        };
        let start = |command: &str, client: usize, log: &str| {
            let words = words(command, client);
            let words: Vec<_> = words.iter().map(String::as_str).collect();
            let mut options = Vec::new();
            if let Some(faults) = &case.faults {
                options.extend(["--inject", faults]);
            }
            let mut command = self.command_at(network, &address(client), &options, &words);
            command.envs(case.variable.clone());
            self.start(command, &format!("{}.{log}", case.path()))
        };
        let mut server = match &case.server {
            Some(command) => Some(start(command, 0, "server")?),
            None => None,
        };
        if let Some(server) = &mut server {
            wait_until_ready(server, &case.ready, &address(0), &port)?;
        }
        let mut clients = Vec::new();
        for number in 1..=case.clients {
            if number > 1 {
                std::thread::sleep(SETTLE);
            }
            if let Some(command) = &case.client {
                clients.push(start(command, number, &format!("client{number}"))?);
            }
        }
        let exited: Vec<_> = clients.iter_mut().map(|c| c.finish(until)).collect();
        // If a client has failed, the server might wait forever.
        let is_failed = check_outcome(case, None, &exited).is_err();
        let server = server.map(|mut server| {
            if case.stop || is_failed {
                server.request_stop();
            }
            server.finish(until.max(Instant::now() + PATIENCE))
        });
        check_outcome(case, server.as_ref(), &exited)
    }
}

fn copy(from: &Path, directory: &Path) -> Result<PathBuf, Failure> {
    let to = directory.join(from.file_name().unwrap_or_default());
    fs::copy(from, &to).map_err(|e| format!("{}: {e}", from.display()))?;
    Ok(to)
}

/// Compiles one of our programs with MPI.
fn compile(source: &str, program: &Path) -> Result<(), Failure> {
    let mut mpicc = sh::cmd("mpicc", ["-O1", "-Wall", "-Wextra", "-Werror", "-o"]);
    sh::output(mpicc.arg(program).arg(crate::root().join(source))).map(drop)
}

pub(super) fn address(number: usize) -> String {
    let [a, b, c, d] = SERVER;
    format!("{a}.{b}.{c}.{}", usize::from(d) + number)
}

/// Returns a log file name without characters that have a special meaning in paths and shells.
fn file_name(path: &str) -> String {
    let keep = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    path.chars()
        .map(|c| if keep(c) { c } else { '_' })
        .collect()
}

/// Waits until a server is ready for clients.
pub(super) fn wait_until_ready(
    server: &mut Process,
    ready: &Ready,
    addr: &str,
    port: &str,
) -> Result<(), Failure> {
    let port = port.parse::<u16>()?;
    let addr = addr.parse::<Ipv4Addr>()?.octets();
    let pid = server.pid();
    server.wait_until(PATIENCE, |server| match ready {
        Ready::Port => is_listening(pid, port),
        Ready::Device => has_socket(pid, addr, 4791),
        Ready::Says(words) => server.output().contains(words),
    })?;
    if *ready == Ready::Device {
        // When it only waits, it's listening. If it never sleeps, it has had enough time.
        let (mut used, mut since) = (cpu_of_sleeper(pid), Instant::now());
        let until = Instant::now() + BUSY;
        while since.elapsed() < SETTLE && Instant::now() < until {
            std::thread::sleep(POLL_INTERVAL);
            let now = cpu_of_sleeper(pid);
            if now.is_none() || now != used {
                (used, since) = (now, Instant::now());
            }
        }
    }
    Ok(())
}

/// Returns the CPU ticks used by a process if it's sleeping (`/proc/PID/stat`: fields 3, 14 and
/// 15).
fn cpu_of_sleeper(pid: u32) -> Option<(u64, u64)> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The process name is in parentheses and may contain spaces.
    let (_, rest) = text.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    let state = fields.next()?;
    let (user, system) = (fields.nth(10)?, fields.next()?);
    let used = (user.parse().ok()?, system.parse().ok()?);
    (state == "S").then_some(used)
}

/// Returns whether a TCP port is in the listen state on any address in the network namespace of a
/// process (`/proc/PID/net/tcp`: state 0A).
fn is_listening(pid: u32, port: u16) -> bool {
    let end = format!(":{port:04X}");
    ["tcp", "tcp6"].iter().any(|table| {
        let text = fs::read_to_string(format!("/proc/{pid}/net/{table}")).unwrap_or_default();
        text.lines().any(|line| {
            let mut fields = line.split_whitespace().skip(1);
            let (local, state) = (fields.next(), fields.nth(1));
            local.is_some_and(|local| local.ends_with(&end)) && state == Some("0A")
        })
    })
}

/// Returns whether there is a UDP socket for this address and port in the network namespace of a
/// process.
fn has_socket(pid: u32, addr: [u8; 4], port: u16) -> bool {
    // The kernel prints the address in host byte order.
    let start = format!("{:08X}:{port:04X}", u32::from_ne_bytes(addr));
    let text = fs::read_to_string(format!("/proc/{pid}/net/udp")).unwrap_or_default();
    text.lines()
        .any(|line| line.split_whitespace().nth(1) == Some(&start))
}

fn check_outcome(case: &Case, server: Option<&Exited>, clients: &[Exited]) -> Result<(), Failure> {
    let named = clients
        .iter()
        .enumerate()
        .map(|(n, exited)| (format!("client {}", n + 1), exited));
    for (name, exited) in named.clone() {
        let status = status(&name, exited)?;
        if status.success() == case.refused {
            return Err(failure(&name, &status.to_string(), exited));
        }
        check(&name, exited, &case.says)?;
    }
    if let Some(exited) = server {
        let status = status("the server", exited)?;
        let is_stopped = case.stop && status.signal() == Some(Signal::TERM.as_raw());
        if !status.success() && !is_stopped {
            return Err(failure("the server", &status.to_string(), exited));
        }
        let says = if clients.is_empty() {
            &case.says[..]
        } else {
            &[]
        };
        check("the server", exited, says)?;
    }
    Ok(())
}

/// Returns the exit status of a process. Returns an error if it timed out, was killed by a signal
/// or the library has panicked.
pub(super) fn status(name: &str, exited: &Exited) -> Result<ExitStatus, Failure> {
    // A program may continue after a panic, so this could be hidden by later output.
    if let Some(at) = exited.output.find("panicked at") {
        let lines = exited.output[at..].lines().take(2).collect::<Vec<_>>();
        return Err(format!("{name}: the library {}", lines.join(" ")).into());
    }
    match exited.status {
        None => Err(failure(name, "it timed out", exited)),
        Some(status) => match status.signal() {
            Some(signal) if signal != Signal::TERM.as_raw() => {
                Err(failure(name, &status.to_string(), exited))
            }
            _ => Ok(status),
        },
    }
}

fn check(name: &str, exited: &Exited, says: &[String]) -> Result<(), Failure> {
    match says
        .iter()
        .find(|words| !exited.output.contains(words.as_str()))
    {
        Some(words) => Err(failure(
            name,
            &format!("missing {words:?} in the output"),
            exited,
        )),
        None => Ok(()),
    }
}

/// Creates an error for a process, including its last output.
pub(super) fn failure(name: &str, what: &str, exited: &Exited) -> Failure {
    format!("{name}: {what}\n{}", tail(&exited.output)).into()
}

pub(super) fn tail(said: &str) -> String {
    let lines = sh::last_lines(said, 4).into_iter();
    let lines = lines.map(|line| format!("    {}", line.trim_end()));
    lines.collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::super::cases;
    use super::*;

    fn exited(raw: i32, said: &str) -> Exited {
        Exited {
            status: Some(ExitStatus::from_raw(raw)),
            output: said.to_owned(),
        }
    }

    fn case(name: &str) -> Case {
        let cases = cases::all().into_iter();
        let mut cases = cases.filter(|case| case.path().ends_with(&format!("/{name}")));
        cases.next().unwrap()
    }

    /// Returns the first line of the error.
    fn verdict(case: &Case, server: Option<&Exited>, clients: &[Exited]) -> String {
        let result = check_outcome(case, server, clients);
        let why = result.err().map(|e| e.to_string()).unwrap_or_default();
        why.lines().next().unwrap_or_default().to_owned()
    }

    #[test]
    fn success_requires_output_from_both_ends() {
        let pair = case("ibv_rc_pingpong -c");
        let good = exited(0, "1000 iters in 0.01 seconds = 12.19 usec/iter\n");
        let silent = exited(0, "");
        let failed = exited(1 << 8, "poll CQ failed -1\n");
        let crashed = exited(11, "");
        let late = Exited {
            status: None,
            output: String::new(),
        };
        let of = |server: &Exited, client: &Exited| {
            verdict(&pair, Some(server), std::slice::from_ref(client))
        };
        assert_eq!(of(&good, &good), "");
        assert_eq!(
            of(&good, &silent),
            "client 1: missing \"usec/iter\" in the output"
        );
        assert_eq!(of(&good, &failed), "client 1: exit status: 1");
        assert_eq!(of(&failed, &good), "the server: exit status: 1");
        assert!(of(&good, &crashed).contains("signal: 11"));
        assert_eq!(of(&late, &good), "the server: it timed out");
        let panicked = exited(0, "thread panicked at a.rs:1\n usec/iter");
        let why = "client 1: the library panicked at a.rs:1  usec/iter";
        assert_eq!(of(&good, &panicked), why);
        // We did not send a signal to this server.
        assert!(of(&exited(15, ""), &good).contains("signal: 15"));
    }

    #[test]
    fn stopped_server_may_exit_by_signal() {
        let watch = case("ibv_asyncwatch");
        let of = |raw, said: &str| verdict(&watch, Some(&exited(raw, said)), &[]);
        assert_eq!(of(15, "riser0: async event FD 4"), "");
        assert_eq!(of(0, "riser0: async event FD 4"), "");
        assert!(of(15, "").contains("riser0"));
        assert!(of(6, "riser0").contains("signal: 6"));
    }

    #[test]
    fn expected_rejection_must_not_crash() {
        let port = case("port 2");
        let of = |raw| verdict(&port, None, &[exited(raw, "")]);
        assert_eq!(of(1 << 8), "");
        assert_eq!(of(0), "client 1: exit status: 0");
        assert!(of(11).contains("signal: 11"));
    }

    #[test]
    fn sockets_are_found() {
        let own = std::process::id();
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(is_listening(own, tcp.local_addr().unwrap().port()));
        let udp = std::net::UdpSocket::bind("127.0.17.9:0").unwrap();
        let port = udp.local_addr().unwrap().port();
        assert!(has_socket(own, [127, 0, 17, 9], port));
        drop(udp);
        assert!(!has_socket(own, [127, 0, 17, 9], port));
        let mut sleeper = Command::new("sleep").arg("60").spawn().unwrap();
        let until = Instant::now() + PATIENCE;
        while cpu_of_sleeper(sleeper.id()).is_none() {
            assert!(Instant::now() < until, "sleep does not sleep");
        }
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
        assert_eq!(address(2), "127.0.17.3");
        assert_eq!(file_name("a/b -c.log"), "a_b_-c.log");
    }
}
