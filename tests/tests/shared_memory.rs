//! Tests when `riser` and `riserd` on the same host use shared memory.

#![allow(missing_docs, reason = "a test")]

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, UdpSocket};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use riser_testkit::eventually;
use riser_testkit::programs::directory;
use riser_transport::shm::{ShmListener, ShmUsers, query_listener};

const IQN: &str = "iqn.2026-01.com.example:shm";

/// A daemon that runs as the current user, so that we can share memory with it.
struct Daemon {
    process: Child,
    dir: PathBuf,
    addr: String,
}

impl Daemon {
    fn start(host: u8, transport: &str) -> Self {
        Self::of_target(host, IQN, 3260, transport)
    }

    /// Starts one of several daemons on the same address, each using a separate target and TCP
    /// port.
    fn of_target(host: u8, iqn: &str, port: u16, transport: &str) -> Self {
        let name = iqn.rsplit(':').next().unwrap();
        let dir = format!("riser-{name}-{}-{host}", std::process::id());
        let dir = std::env::temp_dir().join(dir);
        std::fs::create_dir_all(&dir).unwrap();
        let (addr, socket) = (format!("127.88.0.{host}"), dir.join("admin.sock"));
        let text = format!(
            "backends:\n  a: {{ kind: ram, size: 16MiB }}\ntargets:\n  - name: demo\n    iqn: {iqn}\n    \
             portals:\n      - {{ protocol: srp, listen: \"{addr}\" }}\n      \
             - {{ protocol: iser, listen: \"{addr}:3266\" }}\n      \
             - {{ protocol: iscsi, listen: \"{addr}:{port}\" }}\n    luns: {{ 0: a }}\n    access: open\n\
             transport: {transport}\nadmin: {{ socket: {} }}\nstate: {{ directory: {} }}\n\
             workers: {{ count: 2 }}\n",
            socket.display(),
            dir.join("state").display()
        );
        let config = dir.join("riserd.yaml");
        std::fs::write(&config, text).unwrap();
        let log = std::fs::File::create(dir.join("log")).unwrap();
        let process = Command::new(directory().join("riserd"))
            .args(["run", "--config"])
            .arg(&config)
            .stderr(Stdio::from(log))
            .spawn()
            .unwrap();
        eventually("the daemon serves", Duration::from_secs(20), || {
            socket.exists()
        });
        Self { process, dir, addr }
    }

    fn urls(&self) -> [String; 2] {
        let addr = &self.addr;
        [
            format!("srp://{addr}/0"),
            format!("iser://{addr}:3266/{IQN}/0"),
        ]
    }

    fn bench(&self, url: &str, provider: &str, words: &[&str]) -> Output {
        Command::new(directory().join("riser"))
            .args(["-o", "json", "bench", url, "--provider", provider])
            .args(["--warm-up", "0s", "--total", "4M", "--depth", "16"])
            .args(words)
            .env_remove("RISER_PROVIDER")
            .output()
            .unwrap()
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.dir.join("log")).unwrap()
    }

    fn metrics(&self) -> String {
        self.get("/metrics")
    }

    /// Returns a response from the admin API.
    fn get(&self, path: &str) -> String {
        let mut stream = UnixStream::connect(self.dir.join("admin.sock")).unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        response
    }

    /// Returns the name of the device used to access a disk.
    fn device(&self, url: &str, provider: &str, words: &[&str]) -> String {
        let output = self.bench(url, provider, words);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{url}, {provider}: {errors}");
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        report["jobs"][0]["riser"]["device"]
            .as_str()
            .unwrap()
            .to_owned()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

#[test]
fn shared_memory_serves_rdma_protocols() {
    let daemon = Daemon::start(1, "{ provider: shm }");
    let shm = format!("shm-{}", daemon.addr);
    for url in daemon.urls() {
        let write = [
            "--rw",
            "randwrite",
            "--overwrite",
            "--verify",
            "--bs",
            "64K",
        ];
        assert_eq!(daemon.device(&url, "shm", &write), shm);
        assert_eq!(daemon.device(&url, "auto", &["--rw", "randread"]), shm);
    }
    // If the user requests a network benchmark, we must never use shared memory.
    let output = daemon.bench(&daemon.urls()[0], "roce", &["--timeout", "3s"]);
    assert!(!output.status.success());
}

#[test]
fn shared_memory_is_optional_with_network() {
    let daemon = Daemon::start(2, "{ shm: true }");
    let shm = format!("shm-{}", daemon.addr);
    for url in daemon.urls() {
        for (provider, device) in [
            ("shm", shm.as_str()),
            ("auto", shm.as_str()),
            ("roce", "roce-"),
        ] {
            let found = daemon.device(&url, provider, &["--rw", "read"]);
            assert!(found.starts_with(device), "{provider}: {found}");
        }
    }
}

#[test]
fn network_is_used_without_shared_memory() {
    let daemon = Daemon::start(3, "{ provider: roce }");
    let url = &daemon.urls()[0];
    let found = daemon.device(url, "auto", &["--rw", "read"]);
    assert!(found.starts_with("roce-"), "{found}");
    let output = daemon.bench(url, "shm", &["--timeout", "3s"]);
    assert!(!output.status.success());
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    let reason = format!("no process on this host shares memory at {}", daemon.addr);
    assert!(said.contains(&reason), "{said}");
}

#[test]
fn metrics_distinguish_devices_of_one_address() {
    let daemon = Daemon::start(4, "{ shm: true }");
    daemon.device(&daemon.urls()[0], "shm", &["--rw", "read"]);
    let metrics = daemon.metrics();
    let samples = metrics.lines().filter(|line| line.starts_with("riser_"));
    let mut all = BTreeMap::new();
    for (series, value) in samples.filter_map(|line| line.rsplit_once(' ')) {
        let value: f64 = value.parse().unwrap();
        assert_eq!(all.insert(series, value), None, "twice: {series}");
    }
    let sum = |name: &str, labels: &str| -> f64 {
        let device = format!("{name}{{device=\"{}\",{labels}", daemon.addr);
        let some = all.iter().filter(|(series, _)| series.starts_with(&device));
        some.map(|(_, value)| value).sum()
    };
    for provider in ["provider=\"roce\"", "provider=\"shm\""] {
        assert_eq!(sum("riser_device_open", provider), 2.0, "of two workers");
    }
    let packets = "riser_device_packets_total";
    assert_eq!(sum(packets, "provider=\"roce\""), 0.0);
    assert!(sum(packets, "provider=\"shm\"") > 0.0);
    assert!(sum("riser_device_links_total", "provider=\"shm\"") > 0.0);
}

#[test]
fn discovery_log_contains_initiator_address() {
    let daemon = Daemon::start(6, "{ shm: true }");
    let output = Command::new(directory().join("riser"))
        .args(["discover", &format!("srp://{}", daemon.addr)])
        .args(["--provider", "shm", "--addr", "127.88.0.66"])
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    // This must not be the internal name of the link, such as 240.0.0.1.
    let log = daemon.log();
    let mut lines = log.lines().filter(|line| line.contains("targets reported"));
    let line = lines.next().expect("discovery is in the audit log");
    assert!(line.contains("127.88.0.66"), "{line}");
    assert!(!log.contains("240.0."), "{log}");
}

#[test]
fn unserved_address_shares_no_memory() {
    let addr = IpAddr::from([127, 88, 0, 7]);
    // The port used for the software NIC.
    let _taken = UdpSocket::bind((addr, 4791)).unwrap();
    let daemon = Daemon::start(7, "{ shm: true }");
    assert_eq!(daemon.addr, addr.to_string());
    let refused = query_listener(addr, &ShmUsers::default()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
}

#[test]
fn shared_memory_name_conflict_keeps_network() {
    let addr = IpAddr::from([127, 88, 0, 5]);
    let _taken = ShmListener::bind(addr).unwrap();
    let daemon = Daemon::start(5, "{ shm: true }");
    assert_eq!(daemon.addr, addr.to_string());
    // This socket never responds.
    let found = daemon.device(&daemon.urls()[0], "auto", &["--rw", "read"]);
    assert!(found.starts_with("roce-"), "{found}");
}

#[test]
fn memory_is_shared_when_name_is_free() {
    let addr = IpAddr::from([127, 88, 0, 8]);
    let taken = ShmListener::bind(addr).unwrap();
    let daemon = Daemon::start(8, "{ shm: true }");
    let metric = format!("riser_not_served{{kind=\"shared memory\",name=\"{addr}\"}} 1");
    let metrics = daemon.metrics();
    assert!(metrics.contains(&metric), "{metrics}");
    assert!(
        metrics.contains("riser_ready 1"),
        "its portals are: {metrics}"
    );
    let status = daemon.get("/v1/status");
    assert!(status.contains("shared memory"), "{status}");
    drop(taken);
    eventually("it is offered", Duration::from_secs(30), || {
        query_listener(addr, &ShmUsers::default()).is_ok()
    });
    eventually("it is no problem", Duration::from_secs(20), || {
        !daemon.get("/v1/status").contains("shared memory")
    });
}

#[test]
fn other_daemon_is_reached_by_network() {
    let others = "iqn.2026-01.com.example:shared";
    let network = Daemon::of_target(9, IQN, 3260, "{ provider: roce }");
    let shared = Daemon::of_target(9, others, 3261, "{ provider: shm }");
    eventually("it warns of the other one", Duration::from_secs(20), || {
        let warning = "UDP port 4791 of 127.88.0.9 is used by another process";
        shared.log().contains(warning)
    });
    for (iqn, device) in [(IQN, "roce-"), (others, "shm-")] {
        let url = format!("iser://{}:3266/{iqn}/0", network.addr);
        let found = network.device(&url, "auto", &["--rw", "read"]);
        assert!(found.starts_with(device), "{iqn}: {found}");
        let output = Command::new(directory().join("riser"))
            .args(["discover", &url, "--provider", "auto"])
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{iqn}: {errors}");
        let listed = String::from_utf8_lossy(&output.stdout);
        assert!(listed.contains(iqn), "{listed}");
    }
}

#[test]
fn failed_login_does_not_mention_hosts() {
    let daemon = Daemon::start(10, "{ provider: shm }");
    let url = format!("iser://{}:3266/{IQN}.none/0?paths=all", daemon.addr);
    let output = daemon.bench(&url, "shm", &["--rw", "read"]);
    assert!(!output.status.success());
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(said.contains("cannot log in"), "{said}");
    assert!(!said.contains("other hosts"), "{said}");
}
