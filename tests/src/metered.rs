//! A `riserd` that tells of itself on TCP, and work for it.

#![allow(
    clippy::missing_panics_doc,
    reason = "for tests, which panic when something fails"
)]

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

use crate::programs::Pair;

const PATIENCE: Duration = Duration::from_secs(60);

/// The body of what an address answers with success.
#[must_use]
pub fn get(address: &str, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect(address).ok()?;
    write!(
        stream,
        "GET {path} HTTP/1.0\r\nHost: {address}\r\nConnection: close\r\n\r\n"
    )
    .ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    (head.split(' ').nth(1)? == "200").then(|| body.to_owned())
}

/// Waits until there is something.
pub fn wait_for<T>(what: &str, mut get: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + PATIENCE;
    loop {
        if let Some(got) = get() {
            return got;
        }
        assert!(Instant::now() < until, "no {what}");
        thread::sleep(Duration::from_millis(100));
    }
}

/// A process that goes with this value.
pub struct Running(pub Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A daemon with one disk, over SRP and iSCSI.
pub struct Metered {
    /// The daemon, and `riser` beside it.
    pub pair: Pair,
    /// Its target's name.
    pub iqn: String,
    /// Its address.
    pub host: String,
    /// Where it tells of itself.
    pub metrics: String,
}

impl Metered {
    /// Serves at 127.0.`network`.1.
    #[must_use]
    pub fn serve(network: u8) -> Self {
        let host = format!("127.0.{network}.1");
        let iqn = "iqn.2026-01.com.example:metrics".to_owned();
        let portals =
            format!("[{{ protocol: srp, listen: {host} }}, {{ protocol: iscsi, listen: {host} }}]");
        let backend = "{ kind: file, path: DIR/disk.img, size: 32MiB, create: true }";
        let target = format!("iqn: {iqn}\nportals: {portals}");
        let mut pair = Pair::with_target(network, backend, &target);
        pair.kill();
        let metrics = format!("{host}:9909");
        let file = pair.path("riserd.yaml");
        let text = fs::read_to_string(&file).unwrap();
        let more = format!(
            "metrics: {{ listen: \"{metrics}\" }}\nadmin: {{ socket: {} }}\n",
            pair.path("admin.sock")
        );
        fs::write(&file, text + &more).unwrap();
        pair.serve();
        wait_for("readiness", || get(&metrics, "/readyz"));
        Self {
            pair,
            iqn,
            host,
            metrics,
        }
    }
}

/// Reads and writes for `seconds`, in the background.
#[must_use]
pub fn load(pair: &Pair, seconds: u32) -> Running {
    let mut command = pair.command(&["bench", &pair.url(), "--rw", "randrw", "--bs", "4k"]);
    command.args(["--iodepth", "8", "--runtime", &seconds.to_string()]);
    let out = File::create(pair.path("bench.log")).unwrap();
    command.stdout(out.try_clone().unwrap()).stderr(out);
    Running(command.spawn().unwrap())
}
