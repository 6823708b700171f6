//! Two devices at the ends of a separate link, and attacks by a stranger on it.
//!
//! Each end is a thread in a new network namespace, which is removed with the thread. This requires
//! root; a test without root is recorded as skipped.

#![allow(
    unsafe_code,
    reason = "unshare(2) has no safe wrapper that knows which flags are harmless"
)]

mod frames;
mod removal;
mod strangers;
mod ud;

use std::process::Command;
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, JoinHandle};

use riser_transport::roce::{Roce, RoceConfig};
use rustix::thread::{UnshareFlags, gettid, unshare_unsafe};

use crate::software::Real;
use riser_testkit::skip::skip;

/// Addresses of both ends of the link, and of a stranger at B's end.
const V4: [&str; 3] = ["10.9.0.1", "10.9.0.2", "10.9.0.66"];
const V6: [&str; 3] = ["fd09::1", "fd09::2", "fd09::66"];

type Job = Box<dyn FnOnce() + Send>;

/// A thread in a separate network namespace.
struct Network {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl Network {
    fn new() -> Result<Self, String> {
        let (jobs, waiting) = channel::<Job>();
        let (sender, entered) = channel();
        let thread = thread::spawn(move || {
            // SAFETY: the flag only affects the network, which may differ per thread.
            let result = unsafe { unshare_unsafe(UnshareFlags::NEWNET) };
            let is_inside = result.is_ok();
            let _ = sender.send(result);
            while is_inside && let Ok(job) = waiting.recv() {
                job();
            }
        });
        let result = entered.recv().expect("the thread responds");
        result.map_err(|e| format!("a network namespace: {e}"))?;
        Ok(Self {
            jobs: Some(jobs),
            thread: Some(thread),
        })
    }

    /// Runs `job` in the namespace.
    fn run<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> T {
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

/// Devices of a test. Their addresses are those of [`V4`] or [`V6`]; the test runs in the namespace
/// of A.
type Link = Real<Network>;

/// Runs a command, given as words, in the namespace of the calling thread.
fn sh(words: &str) -> Result<String, String> {
    let mut words = words.split_whitespace();
    let mut command = Command::new(words.next().expect("a command"));
    let out = command.args(words).output();
    let out = out.map_err(|e| format!("{command:?}: {e}"))?;
    let error = String::from_utf8_lossy(&out.stderr).into_owned();
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    out.status.success().then_some(text).ok_or(error)
}

/// Creates the link: `v0` here, `v1` at the other end, with jumbo frames.
fn lay(at_b: &Network) -> Result<(), String> {
    let b = at_b.run(|| gettid().as_raw_nonzero().get());
    sh(&format!(
        "ip link add v0 mtu 9000 type veth peer name v1 mtu 9000 netns {b}"
    ))?;
    let up = |addresses: Vec<&str>, device: &str| {
        sh("ip link set lo up")?;
        for address in addresses {
            let rest = if address.contains(':') {
                "/64 nodad"
            } else {
                "/24"
            };
            sh(&format!("ip addr add {address}{rest} dev {device}"))?;
        }
        sh(&format!("ip link set {device} up"))
    };
    at_b.run(move || up(vec![V4[1], V4[2], V6[1], V6[2]], "v1"))?;
    up(vec![V4[0], V6[0]], "v0")?;
    Ok(())
}

/// Runs `body` with a device at each end of a link, at these addresses and configured by `change`.
fn on_a_link(
    test: &'static str,
    [a, b, _]: [&'static str; 3],
    change: fn(&mut RoceConfig),
    body: impl FnOnce(&mut Link) + Send + 'static,
) {
    let at_a = Network::new();
    let link = at_a.and_then(|at_a| {
        let at_b = at_a.run(|| Network::new().and_then(|at_b| lay(&at_b).map(|()| at_b)))?;
        Ok((at_a, at_b))
    });
    let (at_a, at_b) = match link {
        Ok(link) => link,
        Err(why) => return skip(test, &why),
    };
    let open = move |addr: &str| {
        let mut config = RoceConfig::new(addr.parse().unwrap());
        change(&mut config);
        Roce::open(&config).expect("a device at an end of the link")
    };
    // Propagates the panic of a failed test.
    let result = at_a.run(move || {
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let far = at_b.run(move || open(b));
            body(&mut Link {
                a: open(a),
                b: far,
                at_b,
            });
        }))
    });
    if let Err(panic) = result {
        std::panic::resume_unwind(panic);
    }
}
