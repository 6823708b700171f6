//! `riser` and `riserd` on one host: when they share memory, and when they do not.

#![allow(missing_docs, reason = "a test")]

use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use riser_testkit::eventually;
use riser_testkit::programs::folder;

const IQN: &str = "iqn.2026-01.com.example:shm";

/// A daemon that runs as this process's user, which memory is shared with.
struct Daemon {
    process: Child,
    dir: PathBuf,
    addr: String,
}

impl Daemon {
    fn start(host: u8, transport: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("riser-shm-{}-{host}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let (addr, socket) = (format!("127.88.0.{host}"), dir.join("admin.sock"));
        let text = format!(
            "backends:\n  a: {{ kind: ram, size: 16MiB }}\ntargets:\n  - name: demo\n    iqn: {IQN}\n    \
             portals:\n      - {{ protocol: srp, listen: \"{addr}\" }}\n      \
             - {{ protocol: iser, listen: \"{addr}:3266\" }}\n    luns: {{ 0: a }}\n    access: open\n\
             transport: {transport}\nadmin: {{ socket: {} }}\nstate: {{ directory: {} }}\n\
             workers: {{ count: 2 }}\n",
            socket.display(),
            dir.join("state").display()
        );
        let config = dir.join("riserd.yaml");
        std::fs::write(&config, text).unwrap();
        let process = Command::new(folder().join("riserd"))
            .args(["run", "--config"])
            .arg(&config)
            .stderr(Stdio::null())
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
        Command::new(folder().join("riser"))
            .args(["-o", "json", "bench", url, "--provider", provider])
            .args(["--warm-up", "0s", "--total", "4M", "--depth", "16"])
            .args(words)
            .env_remove("RISER_PROVIDER")
            .output()
            .unwrap()
    }

    /// Name of the device over which a disk was reached.
    fn device(&self, url: &str, provider: &str, words: &[&str]) -> String {
        let output = self.bench(url, provider, words);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{url}, {provider}: {errors}");
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        report["device"].as_str().unwrap().to_owned()
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
fn a_daemon_of_shared_memory_serves_every_rdma_protocol() {
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
    // A figure of the network is never one of shared memory.
    let output = daemon.bench(&daemon.urls()[0], "roce", &["--timeout", "3s"]);
    assert!(!output.status.success());
}

#[test]
fn shared_memory_beside_the_network_is_for_those_who_ask_for_it() {
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
fn where_a_daemon_offers_no_shared_memory_the_network_is_used() {
    let daemon = Daemon::start(3, "{ provider: roce }");
    let url = &daemon.urls()[0];
    let found = daemon.device(url, "auto", &["--rw", "read"]);
    assert!(found.starts_with("roce-"), "{found}");
    let output = daemon.bench(url, "shm", &["--timeout", "3s"]);
    assert!(!output.status.success());
}
