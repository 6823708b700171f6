//! Creates four network namespaces: a switch, and the target, honest hosts and the attacker, which
//! are connected to it. Each namespace belongs to a thread and is removed when the thread exits.

use std::net::Ipv4Addr;
use std::process::Command;
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, JoinHandle};

pub(crate) const TARGET: Ipv4Addr = Ipv4Addr::new(10, 11, 0, 1);
/// Address for hosts that are connected when the attack is started.
pub(crate) const HONEST: Ipv4Addr = Ipv4Addr::new(10, 11, 0, 2);
/// Second address for these hosts.
pub(crate) const SECOND: Ipv4Addr = Ipv4Addr::new(10, 11, 0, 4);
/// Address for a host that logs in during the attack.
pub(crate) const LATER: Ipv4Addr = Ipv4Addr::new(10, 11, 0, 3);
pub(crate) const STRANGER: Ipv4Addr = Ipv4Addr::new(10, 11, 0, 66);

type Job = Box<dyn FnOnce() + Send>;

/// A thread in a separate network namespace. Any threads and processes started by its jobs use the
/// same namespace.
pub(crate) struct Network {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    id: libc::pid_t,
}

impl Network {
    pub(crate) fn new() -> Result<Self, String> {
        let (jobs, waiting) = channel::<Job>();
        let (sender, entered) = channel();
        let thread = thread::spawn(move || {
            // SAFETY: this flag only affects the network namespace, which can be different for each
            // thread.
            let result = unsafe { libc::unshare(libc::CLONE_NEWNET) };
            let result = match result {
                // SAFETY: this has no arguments and can't fail.
                0 => Ok(unsafe { libc::gettid() }),
                _ => Err(std::io::Error::last_os_error()),
            };
            let is_inside = result.is_ok();
            let _ = sender.send(result);
            while is_inside && let Ok(job) = waiting.recv() {
                job();
            }
        });
        let result = entered.recv().expect("the thread responds");
        let id = result.map_err(|e| format!("a network namespace: {e}"))?;
        Ok(Self {
            jobs: Some(jobs),
            thread: Some(thread),
            id,
        })
    }

    /// Runs `job` in this namespace. If it panics, we also panic.
    pub(crate) fn run<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> T {
        let (sender, result) = channel();
        let jobs = self.jobs.as_ref().expect("a running thread");
        let job = Box::new(move || drop(sender.send(job())));
        jobs.send(job).expect("a running thread");
        result.recv().expect("the job did not panic")
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// All namespaces and their links.
pub(crate) struct World {
    pub(crate) target: Network,
    pub(crate) hosts: Network,
    pub(crate) stranger: Network,
    /// The switch that forwards all packets.
    pub(crate) switch: Network,
}

impl World {
    pub(crate) fn new() -> Result<Self, String> {
        let world = Self {
            target: Network::new()?,
            hosts: Network::new()?,
            stranger: Network::new()?,
            switch: Network::new()?,
        };
        let ends = [
            (&world.target, "t", vec![TARGET]),
            (&world.hosts, "h", vec![HONEST, SECOND, LATER]),
            (&world.stranger, "s", vec![STRANGER]),
        ];
        world
            .switch
            .run(|| sh("ip link add name bridge type bridge"))?;
        world.switch.run(|| sh("ip link set bridge up"))?;
        for (end, name, addresses) in ends {
            let id = end.id;
            world.switch.run(move || {
                sh(&format!(
                    "ip link add name {name} type veth peer name eth0 netns {id}"
                ))?;
                sh(&format!("ip link set dev {name} master bridge up"))
            })?;
            end.run(move || {
                sh("ip link set lo up")?;
                for address in addresses {
                    sh(&format!("ip addr add {address}/24 dev eth0"))?;
                }
                sh("ip link set eth0 up")
            })?;
        }
        Ok(world)
    }
}

/// Runs a command in the namespace of the current thread.
pub(crate) fn sh(words: &str) -> Result<(), String> {
    let mut words = words.split_whitespace();
    let mut command = Command::new(words.next().expect("a command"));
    let out = command.args(words).output();
    let out = out.map_err(|e| format!("{command:?}: {e}"))?;
    let error = String::from_utf8_lossy(&out.stderr).into_owned();
    out.status.success().then_some(()).ok_or(error)
}
