//! Runs a case: its server and its clients, each under `riser run` and without any right.

use std::fs::{self, File, Permissions};
use std::net::Ipv4Addr;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

use super::cases::{ADMINISTRATOR, Case, ECHO, End, IBACM, Place, Ready};
use super::namespace::{ADDRESSES, Namespace};
use crate::{Failure, sh};

/// User and group without rights, `nobody` and `nogroup` of Debian.
const NOBODY: u32 = 65_534;

/// Address of the server; those of clients follow.
const SERVER: [u8; 4] = [127, 0, 17, 1];

/// First port that is given to cases.
const FIRST_PORT: usize = 21_000;

/// Time that a server sleeps when it listens, and from one client to the next.
const SETTLE: Duration = Duration::from_secs(1);

/// Time after which a server that does not sleep listens all the same.
const BUSY: Duration = Duration::from_secs(3);

/// Longest time that a server takes to get ready, and to end after its clients.
const PATIENCE: Duration = Duration::from_secs(10);

/// Time between two looks at processes.
const LOOK: Duration = Duration::from_millis(20);

/// The programs under test, where a user without rights can read them.
pub(crate) struct Rig {
    riser: PathBuf,
    /// `libriser_drop_in.so`; the library for sockets is beside it.
    library: PathBuf,
    /// Folder that the programs came from.
    programs: PathBuf,
    /// Folder of the copies.
    copies: PathBuf,
    /// A folder that processes may write.
    home: PathBuf,
    logs: PathBuf,
    /// Network namespace for the cases of [`Place::Network`], made when it is first needed, or why
    /// there is none.
    network: OnceLock<Result<Namespace, String>>,
}

/// A process that has ended, or had to be ended.
#[derive(Clone, Debug)]
pub(crate) struct Ended {
    /// Its status; none if its time was up.
    pub(crate) status: Option<ExitStatus>,
    /// Its output, both kinds.
    pub(crate) said: String,
}

impl Rig {
    /// Copies the programs of a folder: a user without rights may not enter that of the sources.
    pub(crate) fn new(
        programs: &Path,
        scratch: &sh::Scratch,
        logs: &Path,
    ) -> Result<Self, Failure> {
        fs::create_dir_all(logs)?;
        fs::set_permissions(scratch.path(), Permissions::from_mode(0o755))?;
        let copy = |name: &str| copy(&programs.join(name), scratch.path());
        copy("librspreload.so")?;
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
        rig.give(&rig.home)?;
        Ok(rig)
    }

    /// A copy of a program that processes can run.
    ///
    /// # Errors
    /// It is not there, or cannot be copied.
    pub(super) fn adopt(&self, program: &Path) -> Result<PathBuf, Failure> {
        copy(program, &self.copies)
    }

    /// Gives a folder to the user that processes run as.
    fn give(&self, folder: &Path) -> Result<(), Failure> {
        fs::set_permissions(folder, Permissions::from_mode(0o700))?;
        self.hand_over(folder)
    }

    /// The program `riser`.
    pub(super) fn riser(&self) -> &Path {
        &self.riser
    }

    /// Gives a file to the user that processes run as.
    pub(super) fn hand_over(&self, file: &Path) -> Result<(), Failure> {
        if sh::is_root() {
            chown(file, Some(NOBODY), Some(NOBODY))?;
        }
        Ok(())
    }

    /// A folder that processes may write, empty.
    pub(super) fn folder(&self, name: &str) -> Result<PathBuf, Failure> {
        let folder = self.home.join(name);
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder)?;
        self.give(&folder)?;
        Ok(folder)
    }

    /// The place with a network interface, which is made when it is first asked for.
    ///
    /// # Errors
    /// The kernel, or a container, does not give namespaces to users.
    pub(super) fn network(&self) -> Result<&Namespace, String> {
        let made = self.network.get_or_init(|| {
            let make = || {
                let folder = self.folder("dev")?;
                let as_user = |command| self.as_user(sh::ending_with_us(command, "KILL"), None);
                Namespace::new(as_user, &folder, &self.logs.join("namespace.log"))
            };
            make().map_err(|why: Failure| why.to_string())
        });
        made.as_ref().map_err(Clone::clone)
    }

    /// A command under `riser run` with devices at addresses, and further options.
    pub(crate) fn command(&self, addr: &str, options: &[&str], words: &[&str]) -> Command {
        self.command_at(None, addr, options, words)
    }

    /// A command like [`Rig::command`], within the place with a network.
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

    /// A command as a user without rights, within the place with a network if one is given.
    pub(super) fn without_rights(&self, run: &Command, network: Option<&Namespace>) -> Command {
        // What a program prints is seen at once, though it is no terminal that it prints to.
        let run = sh::behind(sh::cmd("stdbuf", ["-oL"]), run);
        // Nearest to the program: another user's process would forget the signal.
        self.as_user(sh::ending_with_us(run, "KILL"), network)
    }

    /// A command, by a user without rights where we are root.
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

    /// Starts a command, whose output goes to a log.
    pub(crate) fn start(&self, mut command: Command, log: &str) -> Result<Process, Failure> {
        let log = self.logs.join(format!("{}.log", file_name(log)));
        let out = File::create(&log)?;
        command
            .stdin(Stdio::null())
            .stderr(out.try_clone()?)
            .stdout(out)
            // A group of its own, so that what it has started ends with it.
            .process_group(0);
        let shown = command.get_program().display().to_string();
        let child = command.spawn().map_err(|e| format!("{shown}: {e}"))?;
        Ok(Process { child, log })
    }

    /// Runs a case; returns its time, or what went wrong.
    pub(super) fn run(&self, number: usize, case: &Case) -> Result<Duration, Failure> {
        let began = Instant::now();
        let until = began + Duration::from_secs(case.seconds);
        let port = (FIRST_PORT + number).to_string();
        let dir = self.folder("case")?;
        let network = match case.place {
            Place::Loopback => None,
            Place::Network => Some(self.network()?),
        };
        let address = |number: usize| match case.place {
            Place::Loopback => address(number),
            Place::Network => ADDRESSES[number].to_string(),
        };
        if let Some(config) = case.config {
            let config = config.replace("{server}", &address(0));
            fs::write(dir.join("riserd.yaml"), config)?;
            self.adopt(&self.programs.join("riserd"))?;
        }
        let mut commands = case.server.iter().chain(&case.client);
        if commands.any(|command| command.contains(ADMINISTRATOR)) {
            self.adopt(&self.programs.join(ADMINISTRATOR))?;
        }
        if let Some(source) = case.source {
            compile(source, &dir.join("program"))?;
        }
        if case.is_copy {
            // More than a window of any kind holds, and no multiple of anything.
            let bytes: Vec<u8> = (0..1_234_567_u32).map(|n| (n % 251) as u8).collect();
            fs::write(dir.join("first"), bytes)?;
        }
        fs::write(dir.join(ECHO), include_str!("echo.py"))?;
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
            if let Some(faults) = case.faults {
                options.extend(["--inject", faults]);
            }
            if case.sockets {
                options.push("--sockets");
            }
            let mut command = self.command_at(network, &address(client), &options, &words);
            command.envs(case.variable);
            self.start(command, &format!("{}.{log}", case.path()))
        };
        let mut server = match &case.server {
            Some(command) => Some(start(command, 0, "server")?),
            None => None,
        };
        if let Some(server) = &mut server {
            wait_until_ready(server, case.ready, &address(0), &port)?;
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
        let ended: Vec<_> = clients.iter_mut().map(|c| c.end(until)).collect();
        // A server may wait for ever for a client that has failed.
        let is_failed = judge(case, None, &ended).is_err();
        let server = server.map(|mut server| {
            if case.end == End::Asked || is_failed {
                server.ask();
            }
            server.end(until.max(Instant::now() + PATIENCE))
        });
        judge(case, server.as_ref(), &ended)?;
        if case.is_copy {
            let same = fs::read(dir.join("first"))? == fs::read(dir.join("second"))?;
            if !same {
                return Err("the copy differs".into());
            }
        }
        Ok(began.elapsed())
    }
}

/// A running process of a case. It is ended when the value goes.
pub(crate) struct Process {
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Output until now.
    fn said(&self) -> String {
        let said = fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(&said).into_owned()
    }

    /// Waits until it has said something.
    pub(super) fn await_words(&self, words: &str, time: Duration) -> Result<(), Failure> {
        let until = Instant::now() + time;
        while !self.said().contains(words) {
            if Instant::now() > until {
                return Err(format!("does not say {words:?}\n{}", tail(&self.said())).into());
            }
            std::thread::sleep(LOOK);
        }
        Ok(())
    }

    fn signal(&self, signal: Signal) {
        if let Some(group) = Pid::from_raw(self.child.id().cast_signed()) {
            let _ = kill_process_group(group, signal);
        }
    }

    /// Asks it to end.
    fn ask(&self) {
        self.signal(Signal::TERM);
    }

    /// Whether it has ended by itself.
    pub(super) fn has_ended(&mut self) -> Result<bool, Failure> {
        Ok(self.child.try_wait()?.is_some())
    }

    /// Waits for its end, and ends it when its time is up.
    pub(crate) fn end(&mut self, until: Instant) -> Ended {
        let status = loop {
            match self.child.try_wait() {
                Ok(Some(status)) => break Some(status),
                Ok(None) if Instant::now() < until => std::thread::sleep(LOOK),
                _ => break None,
            }
        };
        // Its children are in its group, and may be left.
        self.signal(Signal::KILL);
        let _ = self.child.wait();
        Ended {
            status,
            said: self.said(),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.signal(Signal::KILL);
            let _ = self.child.wait();
        }
    }
}

/// Copies a file into a folder.
fn copy(from: &Path, folder: &Path) -> Result<PathBuf, Failure> {
    let to = folder.join(from.file_name().unwrap_or_default());
    fs::copy(from, &to).map_err(|e| format!("{}: {e}", from.display()))?;
    Ok(to)
}

/// Compiles a program of ours against MPI.
fn compile(source: &str, program: &Path) -> Result<(), Failure> {
    let mut mpicc = sh::cmd("mpicc", ["-O1", "-Wall", "-Wextra", "-Werror", "-o"]);
    sh::output(mpicc.arg(program).arg(crate::root().join(source))).map(drop)
}

/// Address of the server (0) or of a client, where it is one of loopback.
pub(super) fn address(number: usize) -> String {
    let [a, b, c, d] = SERVER;
    format!("{a}.{b}.{c}.{}", usize::from(d) + number)
}

/// Name of a log, without what means something in paths and shells.
fn file_name(path: &str) -> String {
    let keep = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    path.chars()
        .map(|c| if keep(c) { c } else { '_' })
        .collect()
}

/// Waits for a server that takes clients.
pub(super) fn wait_until_ready(
    server: &mut Process,
    ready: Ready,
    addr: &str,
    port: &str,
) -> Result<(), Failure> {
    let until = Instant::now() + PATIENCE;
    let port = port.parse::<u16>()?;
    let addr = addr.parse::<Ipv4Addr>()?.octets();
    let pid = server.child.id();
    loop {
        let is_ready = match ready {
            Ready::Port => is_listening(pid, port),
            Ready::Datagrams => has_socket(pid, addr, port),
            Ready::Device => has_socket(pid, addr, 4791),
            Ready::Says(words) => server.said().contains(words),
        };
        if is_ready {
            break;
        }
        if let Some(status) = server.child.try_wait()? {
            return Err(format!(
                "the server ended at once, {status}\n{}",
                tail(&server.said())
            )
            .into());
        }
        if Instant::now() > until {
            return Err(format!("the server did not get ready\n{}", tail(&server.said())).into());
        }
        std::thread::sleep(LOOK);
    }
    if ready == Ready::Device {
        // It listens when it has nothing to do but to wait. One that never sleeps has had the time.
        let (mut used, mut since) = (cpu_of_sleeper(pid), Instant::now());
        let until = Instant::now() + BUSY;
        while since.elapsed() < SETTLE && Instant::now() < until {
            std::thread::sleep(LOOK);
            let now = cpu_of_sleeper(pid);
            if now.is_none() || now != used {
                (used, since) = (now, Instant::now());
            }
        }
    }
    Ok(())
}

/// Ticks of the processor that a process has used, if it sleeps (`/proc/PID/stat`: fields 3, 14 and
/// 15).
fn cpu_of_sleeper(pid: u32) -> Option<(u64, u64)> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in brackets, may have spaces.
    let (_, rest) = text.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    let state = fields.next()?;
    let (user, system) = (fields.nth(10)?, fields.next()?);
    let used = (user.parse().ok()?, system.parse().ok()?);
    (state == "S").then_some(used)
}

/// Whether a TCP port of any address is listened at in a process's network (`/proc/PID/net/tcp`: state
/// 0A).
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

/// Whether there is a UDP socket at an address and port in a process's network.
fn has_socket(pid: u32, addr: [u8; 4], port: u16) -> bool {
    // The kernel prints the address as a number of the host.
    let start = format!("{:08X}:{port:04X}", u32::from_ne_bytes(addr));
    let text = fs::read_to_string(format!("/proc/{pid}/net/udp")).unwrap_or_default();
    text.lines()
        .any(|line| line.split_whitespace().nth(1) == Some(&start))
}

/// Judges the ends of all processes of a case.
fn judge(case: &Case, server: Option<&Ended>, clients: &[Ended]) -> Result<(), Failure> {
    let named = clients
        .iter()
        .enumerate()
        .map(|(n, ended)| (format!("client {}", n + 1), ended));
    for (name, ended) in named.clone() {
        let status = status(&name, ended)?;
        if status.success() == case.is_refused {
            return Err(failure(&name, &status.to_string(), ended));
        }
        check(&name, ended, &case.says)?;
    }
    if let Some(ended) = server {
        let status = status("the server", ended)?;
        let is_asked = case.end == End::Asked && status.signal() == Some(Signal::TERM.as_raw());
        if !status.success() && !is_asked {
            return Err(failure("the server", &status.to_string(), ended));
        }
        let says = if clients.is_empty() {
            &case.says[..]
        } else {
            &[]
        };
        check("the server", ended, says)?;
    }
    Ok(())
}

/// Status of a process that has ended by itself, and not by a mistake that the kernel or the library
/// ended.
pub(super) fn status(name: &str, ended: &Ended) -> Result<ExitStatus, Failure> {
    // Programs may go on after it, and what follows hides it.
    if let Some(at) = ended.said.find("panicked at") {
        let lines = ended.said[at..].lines().take(2).collect::<Vec<_>>();
        return Err(format!("{name}: the library {}", lines.join(" ")).into());
    }
    match ended.status {
        None => Err(failure(name, "its time was up", ended)),
        Some(status) => match status.signal() {
            Some(signal) if signal != Signal::TERM.as_raw() => {
                Err(failure(name, &status.to_string(), ended))
            }
            _ => Ok(status),
        },
    }
}

fn check(name: &str, ended: &Ended, says: &[&str]) -> Result<(), Failure> {
    match says.iter().find(|words| !ended.said.contains(**words)) {
        Some(words) => Err(failure(name, &format!("does not say {words:?}"), ended)),
        None => Ok(()),
    }
}

/// A failure of a process, with the end of its output.
pub(super) fn failure(name: &str, what: &str, ended: &Ended) -> Failure {
    format!("{name}: {what}\n{}", tail(&ended.said)).into()
}

/// The last lines of an output.
pub(super) fn tail(said: &str) -> String {
    let lines: Vec<_> = said
        .lines()
        .filter(|line| !line.trim().is_empty())
        .collect();
    let first = lines.len().saturating_sub(4);
    let lines = lines[first..]
        .iter()
        .map(|line| format!("    {}", line.trim_end()));
    lines.collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::super::cases;
    use super::*;

    fn ended(raw: i32, said: &str) -> Ended {
        Ended {
            status: Some(ExitStatus::from_raw(raw)),
            said: said.to_owned(),
        }
    }

    fn case(name: &str) -> Case {
        let cases = cases::all().into_iter();
        let mut cases = cases.filter(|case| case.name == name);
        cases.next().unwrap()
    }

    /// The first line of what is wrong.
    fn verdict(case: &Case, server: Option<&Ended>, clients: &[Ended]) -> String {
        let result = judge(case, server, clients);
        let why = result.err().map(|e| e.to_string()).unwrap_or_default();
        why.lines().next().unwrap_or_default().to_owned()
    }

    #[test]
    fn both_ends_must_succeed_and_say_it() {
        let pair = case("ibv_rc_pingpong -c");
        let good = ended(0, "1000 iters in 0.01 seconds = 12.19 usec/iter\n");
        let silent = ended(0, "");
        let failed = ended(1 << 8, "poll CQ failed -1\n");
        let crashed = ended(11, "");
        let late = Ended {
            status: None,
            said: String::new(),
        };
        let of = |server: &Ended, client: &Ended| {
            verdict(&pair, Some(server), std::slice::from_ref(client))
        };
        assert_eq!(of(&good, &good), "");
        assert_eq!(of(&good, &silent), "client 1: does not say \"usec/iter\"");
        assert_eq!(of(&good, &failed), "client 1: exit status: 1");
        assert_eq!(of(&failed, &good), "the server: exit status: 1");
        assert!(of(&good, &crashed).contains("signal: 11"));
        assert_eq!(of(&late, &good), "the server: its time was up");
        let panicked = ended(0, "thread panicked at a.rs:1\n usec/iter");
        let why = "client 1: the library panicked at a.rs:1  usec/iter";
        assert_eq!(of(&good, &panicked), why);
        // This server was not asked to end.
        assert!(of(&ended(15, ""), &good).contains("signal: 15"));
    }

    #[test]
    fn a_server_that_is_asked_may_end_by_the_signal() {
        let watch = case("ibv_asyncwatch");
        let of = |raw, said: &str| verdict(&watch, Some(&ended(raw, said)), &[]);
        assert_eq!(of(15, "riser0: async event FD 4"), "");
        assert_eq!(of(0, "riser0: async event FD 4"), "");
        assert!(of(15, "").contains("riser0"));
        assert!(of(6, "riser0").contains("signal: 6"));
    }

    #[test]
    fn what_must_be_refused_may_not_crash() {
        let port = case("port 2");
        let of = |raw| verdict(&port, None, &[ended(raw, "")]);
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
