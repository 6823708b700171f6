//! A hung file server below one of three disks under load.

use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use riser_testkit::hung_mount::{HungMount, Silence};
use riser_testkit::programs::skip;

use crate::limits::load;
use crate::target::Daemon;
use crate::{ended, eventually};

const IQN: &str = "iqn.2026-01.com.example:t";

/// LUNs: the disk on this mount, and two healthy disks.
const DEAD: u8 = 0;
const FILE: u8 = 1;
const RAM: u8 = 2;

/// Number of 4 KiB operations to be completed by each load on a healthy disk.
const OPERATIONS: f64 = 512.0;
const TOTAL: &[&str] = &["--total=2M"];

/// Maximum time for a daemon to wait for block operations when it's stopped.
const ENDING: Duration = Duration::from_secs(90);

fn config(address: &str, mount: &HungMount) -> String {
    format!(
        "
backends:
  dead: {{ kind: file, path: {} }}
  file: {{ kind: file, path: DIR/file, size: 16MiB, create: true }}
  ram: {{ kind: ram, size: 16MiB }}
targets:
  - name: t
    iqn: {IQN}
    portals:
      - {{ protocol: srp, listen: {address} }}
      - {{ protocol: iser, listen: {address} }}
      - {{ protocol: iscsi, listen: {address} }}
    luns: {{ {DEAD}: dead, {FILE}: file, {RAM}: ram }}
    access: open
metrics: {{ listen: {address}:9909 }}
limits: {{ buffer_pool_mib: 8 }}
workers: {{ count: 1 }}",
        mount.file().display()
    )
}

/// A daemon, and the mount used for one of its disks.
struct Bench {
    daemon: Daemon,
    mount: HungMount,
    address: &'static str,
}

impl Bench {
    /// Skips the test and returns `None` if FUSE is not available.
    fn start(name: &str, address: &'static str) -> Option<Self> {
        let dir = std::env::temp_dir().join(format!("riser-mounts-{}-{name}", std::process::id()));
        let mount = HungMount::new(&dir, 64 << 20)
            .inspect_err(|error| skip(name, &error.to_string()))
            .ok()?;
        let mut daemon = Daemon::new(&config(address, &mount));
        daemon.serve();
        Some(Self {
            daemon,
            mount,
            address,
        })
    }

    fn urls(&self, lun: u8) -> [String; 3] {
        let address = self.address;
        [
            format!("srp://{address}/{lun}"),
            format!("iser://{address}/{IQN}/{lun}"),
            format!("iscsi://{address}/{IQN}/{lun}"),
        ]
    }

    /// Starts to write 16 MiB to the hung disk using each protocol.
    fn begin_writes(&self) -> Vec<Child> {
        let data = self.daemon.path("much");
        std::fs::write(&data, vec![7; 16 << 20]).unwrap();
        let begin = |url: &String| {
            let args = ["write", url, data.to_str().unwrap(), "-q", "--overwrite"];
            let mut command = self.daemon.riser(&args);
            command.stdout(Stdio::null()).stderr(Stdio::null());
            command.spawn().unwrap()
        };
        self.urls(DEAD).iter().map(begin).collect()
    }

    /// Completes operations on both healthy disks using each protocol, all at the same time.
    fn use_healthy_disks(&self) {
        let urls = [self.urls(FILE), self.urls(RAM)].concat();
        let loads: Vec<_> = urls
            .iter()
            .zip(["randwrite", "randread", "randwrite"].iter().cycle())
            .map(|(url, rw)| load(&self.daemon, url, rw, TOTAL))
            .collect();
        for (load, url) in loads.into_iter().zip(&urls) {
            let (done, _) = load.join().unwrap();
            assert!(done >= OPERATIONS, "{url}: {done} operations");
        }
    }

    fn problem(&self) -> Option<(String, String)> {
        let status = self.daemon.json(&["status"]);
        let mut problems = status["problems"].as_array()?.iter();
        let dead = problems.find(|problem| problem["name"] == "dead")?;
        let text = |field: &str| dead[field].as_str().unwrap_or_default().to_owned();
        Some((text("state"), text("error")))
    }

    fn get(&self, path: &str) -> String {
        let url = format!("{}:9909{path}", self.address);
        ended(std::process::Command::new("curl").args(["-s", &url])).1
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        // The daemon can't exit before the mount was removed.
        self.mount.kill();
    }
}

#[test]
fn dead_mount_delays_no_other_disk() {
    let Some(mut bench) = Bench::start("dead_mount_delays_no_other_disk", "127.0.238.1") else {
        return;
    };
    let [srp, iser, iscsi] = bench.urls(RAM);
    bench.daemon.write_block(&srp, 5);
    for silence in [Silence::Data, Silence::All] {
        bench.mount.hang(silence);
        let mut writes = bench.begin_writes();
        eventually("the file server has requests", || bench.mount.pending() > 0);
        bench.use_healthy_disks();
        eventually("the hang is reported", || {
            bench.problem().is_some_and(|(state, _)| state == "HANGING")
        });
        let ready = bench.get("/readyz");
        assert!(ready.contains("backend dead: "), "{ready}");
        let fault = "riser_backend_fault{backend=\"dead\",cause=\"hanging\"} 1";
        assert!(bench.get("/metrics").contains(fault));
        bench.daemon.write_block(&iscsi, 6);
        let (code, _, error) = bench.daemon.run_command(&["upgrade"]);
        assert_eq!(code, 1, "{error}");
        assert!(error.contains("nothing has changed"), "{error}");
        assert_eq!(bench.daemon.read_block(&iser), [6; 4096], "the RAM disk");
        bench.use_healthy_disks();
        assert!(bench.mount.pending() > 0, "it still hangs");

        bench.mount.resume();
        for write in &mut writes {
            let _ = write.wait();
        }
        eventually("the disk responds", || bench.problem().is_none());
        assert_eq!(bench.get("/readyz"), "ok\n");
    }

    // The file server is stopped permanently.
    bench.mount.hang(Silence::Data);
    let mut writes = bench.begin_writes();
    eventually("the file server has requests", || bench.mount.pending() > 0);
    bench.mount.kill();
    for write in &mut writes {
        assert!(!write.wait().unwrap().success(), "the disk is lost");
    }
    for url in bench.urls(DEAD) {
        let (code, _, error) = ended(&mut bench.daemon.riser(&["read", &url, "/dev/null", "-q"]));
        assert_ne!(code, 0);
        assert!(error.contains("not ready"), "{url}: {error}");
    }
    eventually("the loss is reported", || {
        bench
            .problem()
            .is_some_and(|(state, _)| state == "NOT SERVED")
    });
    bench.use_healthy_disks();
    let begin = Instant::now();
    bench.daemon.terminate();
    assert!(begin.elapsed() < ENDING);
}

/// The kernel keeps the process until its last block operation has completed, but the service stops
/// earlier.
#[test]
fn hung_mount_delays_termination_for_limited_time() {
    let name = "hung_mount_delays_termination_for_limited_time";
    let Some(mut bench) = Bench::start(name, "127.0.239.1") else {
        return;
    };
    bench.mount.hang(Silence::Data);
    let mut writes = bench.begin_writes();
    eventually("the file server has requests", || bench.mount.pending() > 0);
    bench.daemon.signal("TERM");
    let log = |bench: &Bench| bench.daemon.log().contains("have been in progress");
    riser_testkit::eventually("the daemon gives up", ENDING, || log(&bench));
    for write in &mut writes {
        let _ = write.kill();
        let _ = write.wait();
    }
    bench.mount.kill();
    let begin = Instant::now();
    bench.daemon.terminate();
    assert!(begin.elapsed() < ENDING);
}
