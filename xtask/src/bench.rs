//! `cargo xtask bench`: our target beside its peers on the same file, in one run.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::daemon::{self, Daemon, TARGET, URL, terminate};
use crate::packages::{ensure, need};
use crate::{Failure, sh};

/// Options of `cargo xtask bench`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Seconds of each measurement.
    #[arg(long, default_value_t = 5)]
    seconds: u32,
    /// Number of runs of every measurement; medians are printed.
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// Size of the file, in MiB.
    #[arg(long, default_value_t = 1024)]
    size_mb: u64,
    /// Folder of the file; a tmpfs shows the software, a disk shows the disk.
    #[arg(long, default_value = "/dev/shm")]
    folder: PathBuf,
}

/// One workload, in fio's words.
struct Workload {
    name: &'static str,
    rw: &'static str,
    bs: &'static str,
    depth: u32,
    /// MB/s, rather than IOPS, is the figure to compare.
    bandwidth: bool,
}

const WORKLOADS: &[Workload] = &[
    Workload {
        name: "4 KiB random read, depth 1",
        rw: "randread",
        bs: "4k",
        depth: 1,
        bandwidth: false,
    },
    Workload {
        name: "4 KiB random read, depth 32",
        rw: "randread",
        bs: "4k",
        depth: 32,
        bandwidth: false,
    },
    Workload {
        name: "128 KiB sequential read, depth 8",
        rw: "read",
        bs: "128k",
        depth: 8,
        bandwidth: true,
    },
];

/// Result of a measurement.
#[derive(Clone, Copy)]
struct Figure {
    iops: f64,
    megabytes: f64,
}

/// Measures and prints a table that can go into a document.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let needs = [
        need("fio", "fio", "the peers' client"),
        need("qemu-nbd", "qemu-utils", "qemu-nbd as a peer"),
    ];
    if let Some(n) = ensure(&needs).first() {
        return Err(format!("the benchmark needs {} ({})", n.program, n.package).into());
    }
    let rig = Rig::prepare(options)?;
    type Measure = fn(&Rig, &Workload) -> Result<Figure, Failure>;
    let peers: [(&str, Measure); 3] = [
        ("`fio` (io_uring) on the file", Rig::fio_file),
        (
            "`qemu-nbd`, Unix socket, `fio` nbd engine",
            Rig::fio_qemu_nbd,
        ),
        ("`riserd`, SRP over `roce`, `riser bench`", Rig::riser),
    ];
    let mut table = vec![vec![Vec::new(); WORKLOADS.len()]; peers.len()];
    // The rounds are outermost, so that a machine that slows down for a while spoils one figure of
    // each peer, which the median leaves out, and not all of one.
    for round in 1..=options.runs {
        for (p, (name, measure)) in peers.iter().enumerate() {
            for (w, workload) in WORKLOADS.iter().enumerate() {
                let figure = measure(&rig, workload).map_err(|e| format!("{name}: {e}"))?;
                println!(
                    "run {round}: {name}: {}: {}",
                    workload.name,
                    shown(workload, figure)
                );
                table[p][w].push(figure);
            }
        }
    }
    println!(
        "\n| | {} |",
        WORKLOADS
            .iter()
            .map(|w| w.name)
            .collect::<Vec<_>>()
            .join(" | ")
    );
    println!("| --- |{}", " --- |".repeat(WORKLOADS.len()));
    for ((name, _), row) in peers.iter().zip(&table) {
        let cells: Vec<_> = WORKLOADS
            .iter()
            .zip(row)
            .map(|(w, figures)| shown(w, median(w, figures)))
            .collect();
        println!("| {name} | {} |", cells.join(" | "));
    }
    println!(
        "\nMedians of {} runs of {} s each.",
        options.runs, options.seconds
    );
    Ok(())
}

fn shown(w: &Workload, f: Figure) -> String {
    if w.bandwidth {
        format!("{:.0} MB/s", f.megabytes)
    } else {
        format!("{:.1}k IOPS", f.iops / 1000.0)
    }
}

fn median(w: &Workload, figures: &[Figure]) -> Figure {
    let mut sorted = figures.to_vec();
    sorted.sort_by(|a, b| {
        if w.bandwidth {
            a.megabytes.total_cmp(&b.megabytes)
        } else {
            a.iops.total_cmp(&b.iops)
        }
    });
    sorted[sorted.len() / 2]
}

struct Rig {
    scratch: PathBuf,
    programs: PathBuf,
    image: PathBuf,
    seconds: u32,
}

impl Rig {
    fn prepare(options: &Options) -> Result<Self, Failure> {
        println!("building riserd and riser");
        let programs = daemon::build_release()?;
        let scratch = options
            .folder
            .join(format!("riser-bench-{}", std::process::id()));
        fs::create_dir_all(&scratch)?;
        let image = scratch.join("disk.img");
        let rig = Self {
            scratch,
            programs,
            image,
            seconds: options.seconds,
        };
        // The file is filled first: reads of a sparse file never reach the disk.
        let fill = format!("--size={}m", options.size_mb);
        sh::output(
            sh::cmd(
                "fio",
                [
                    "--name=fill",
                    "--rw=write",
                    "--bs=1m",
                    "--ioengine=sync",
                    "--minimal",
                ],
            )
            .arg(format!("--filename={}", rig.image.display()))
            .arg(fill),
        )?;
        fs::write(
            rig.scratch.join("riserd.yaml"),
            format!(
                "backends:\n  disk: {{ kind: file, path: {} }}\n{TARGET}",
                rig.image.display()
            ),
        )?;
        Ok(rig)
    }

    fn fio(&self, w: &Workload, engine: &[String]) -> Result<Figure, Failure> {
        let json = sh::output(
            sh::cmd(
                "fio",
                [
                    "--name=job",
                    "--output-format=json",
                    "--time_based",
                    "--randrepeat=0",
                ],
            )
            .args([format!("--rw={}", w.rw), format!("--bs={}", w.bs)])
            .args([
                format!("--iodepth={}", w.depth),
                format!("--runtime={}", self.seconds),
            ])
            .args(engine),
        )?;
        // fio may print warnings before its JSON.
        let v: Value = serde_json::from_str(json.get(json.find('{').unwrap_or(0)..).unwrap_or(""))?;
        figure(&v["jobs"][0]["read"])
    }

    fn fio_file(&self, w: &Workload) -> Result<Figure, Failure> {
        self.fio(
            w,
            &[
                "--ioengine=io_uring".into(),
                format!("--filename={}", self.image.display()),
            ],
        )
    }

    fn fio_qemu_nbd(&self, w: &Workload) -> Result<Figure, Failure> {
        let socket = self.scratch.join("qemu.sock");
        let _server = QemuNbd::start(&self.image, &socket)?;
        self.fio(
            w,
            &[
                "--ioengine=nbd".into(),
                format!("--uri=nbd+unix:///?socket={}", socket.display()),
            ],
        )
    }

    fn riser(&self, w: &Workload) -> Result<Figure, Failure> {
        let config = self.scratch.join("riserd.yaml");
        // A daemon for each measurement, as with qemu-nbd: what one has cached in itself helps
        // none after it.
        let daemon = Daemon::start(
            &self.programs.join("riserd"),
            &config,
            &self.scratch.join("riserd.log"),
        )?;
        let (depth, seconds) = (w.depth.to_string(), self.seconds.to_string());
        let args = [
            "-o",
            "json",
            "bench",
            URL,
            "--addr",
            "127.0.0.2",
            "--rw",
            w.rw,
            "--bs",
            w.bs,
            "--iodepth",
            &depth,
            "--runtime",
            &seconds,
        ];
        let json = sh::output(&mut sh::cmd(self.programs.join("riser"), args))?;
        daemon.stop()?;
        figure(&serde_json::from_str::<Value>(&json)?["read"])
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.scratch);
    }
}

/// Reads the two figures that fio and `riser bench` both name so.
fn figure(v: &Value) -> Result<Figure, Failure> {
    let iops = v["iops"].as_f64().ok_or("no iops in the result")?;
    let bytes = v["bw_bytes"].as_f64().ok_or("no bw_bytes in the result")?;
    Ok(Figure {
        iops,
        megabytes: bytes / 1e6,
    })
}

/// One line about a result of `riser bench`.
pub(crate) fn summary(v: &Value) -> String {
    figure(&v["read"]).map_or_else(
        |e| e.to_string(),
        |f| format!("{:.1}k IOPS, {:.0} MB/s", f.iops / 1000.0, f.megabytes),
    )
}

/// A `qemu-nbd` that ends with the value.
struct QemuNbd(Child);

impl QemuNbd {
    fn start(image: &Path, socket: &Path) -> Result<Self, Failure> {
        let _ = fs::remove_file(socket);
        let child = sh::cmd(
            "qemu-nbd",
            [
                "-f",
                "raw",
                "--persistent",
                "--aio=io_uring",
                "--cache=writeback",
                "-e",
                "8",
            ],
        )
        .arg("-k")
        .arg(socket)
        .arg(image)
        .stdin(Stdio::null())
        .spawn()?;
        let server = Self(child);
        for _ in 0..250 {
            if socket.exists() {
                return Ok(server);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Err("qemu-nbd did not open its socket".into())
    }
}

impl Drop for QemuNbd {
    fn drop(&mut self) {
        terminate(self.0.id());
        let _ = self.0.wait();
    }
}
