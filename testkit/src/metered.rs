//! Runs a `riserd` that provides metrics over TCP, and generates load for it.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Child;
use std::time::Duration;

use crate::eventually_some;
use crate::programs::Pair;

/// Returns the body of an HTTP response, or `None` if it was not successful.
#[must_use]
pub fn get(address: &str, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect(address).ok()?;
    write!(
        stream,
        "GET {path} HTTP/1.0\r\nHost: {address}\r\nConnection: close\r\n\r\n"
    )
    .ok()?;
    let mut response = String::new();
    stream.read_to_string(&mut response).ok()?;
    let (head, body) = response.split_once("\r\n\r\n")?;
    (head.split(' ').nth(1)? == "200").then(|| body.to_owned())
}

/// A process that is killed on drop.
pub struct Running(pub Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A daemon with a single disk, exported via SRP and iSCSI.
pub struct Metered {
    /// The daemon, along with `riser`.
    pub pair: Pair,
    /// Target name.
    pub iqn: String,
    /// Address of the daemon.
    pub host: String,
    /// Address used for metrics.
    pub metrics: String,
}

impl Metered {
    /// Starts the daemon on 127.0.`network`.1.
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
        eventually_some("readiness", Duration::from_secs(60), || {
            get(&metrics, "/readyz")
        });
        Self {
            pair,
            iqn,
            host,
            metrics,
        }
    }
}

/// Runs reads and writes in the background for this number of seconds.
#[must_use]
pub fn load(pair: &Pair, seconds: u32) -> Running {
    let mut command = pair.command(&["bench", &pair.url(), "--rw", "randrw", "--bs", "4k"]);
    command.args(["--iodepth", "8", "--runtime", &seconds.to_string()]);
    let out = File::create(pair.path("bench.log")).unwrap();
    command.stdout(out.try_clone().unwrap()).stderr(out);
    Running(command.spawn().unwrap())
}
