//! `cargo xtask demo`: the main use case, with real files.
//!
//! `riserd` exports a file as a SCSI LUN via SRP, using the software RoCEv2 NIC at 127.0.0.1, and
//! `riser` attaches it from 127.0.0.2. We create an ext4 file system on it and copy a real
//! directory tree, then detach, restart, attach again, check and compare. This is then repeated
//! with a lossy link.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use walkdir::WalkDir;

use crate::daemon::{self, Daemon, TARGET, URL};
use crate::packages::{ensure, needs};
use crate::{Failure, sh};

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Size of the tree to copy, in MB.
    #[arg(long, default_value_t = 200)]
    tree_mb: u64,
    /// Benchmark duration in seconds.
    #[arg(long, default_value_t = 5)]
    bench_seconds: u32,
}

/// Faults of the lossy link, as a percentage of packets in both directions.
const LOSSY: &str = "loss=2,reorder=5,seed=7";

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let missing = ensure(needs("demo"));
    if let Some(n) = missing.first() {
        return Err(format!("the demo requires {} ({})", n.program, n.package).into());
    }
    let mut demo = Demo::prepare(options)?;
    demo.serve("serve a 1 GiB file on 127.0.0.1")?;
    demo.first_attach()?;
    demo.restart()?;
    demo.second_attach("", &[])?;
    demo.restart()?;
    demo.second_attach(
        "over a link that loses 2 % and reorders 5 %: ",
        &["--inject", LOSSY],
    )?;
    demo.write_over_lossy_link()?;
    demo.bench(options.bench_seconds)?;
    demo.stop()
}

struct Demo {
    scratch: sh::Scratch,
    programs: PathBuf,
    daemon: Option<Daemon>,
    /// Size of the tree, in MB.
    megabytes: u64,
}

impl Demo {
    fn prepare(options: &Options) -> Result<Self, Failure> {
        println!("building riserd and riser");
        let programs = daemon::build()?;
        let scratch = sh::Scratch::new("demo")?;
        fs::create_dir_all(scratch.join("mnt"))?;
        let bytes = collect(&scratch.join("tree"), options.tree_mb * 1_000_000)?;
        fs::write(scratch.join("riserd.yaml"), configuration(scratch.path()))?;
        Ok(Self {
            scratch,
            programs,
            daemon: None,
            megabytes: bytes / 1_000_000,
        })
    }

    fn step<S: AsRef<str>>(
        &mut self,
        name: &str,
        work: impl FnOnce(&mut Self) -> Result<S, Failure>,
    ) -> Result<(), Failure> {
        let started = Instant::now();
        let said = work(self).map_err(|e| format!("{name}: {e}"))?;
        let seconds = started.elapsed().as_secs_f64();
        println!("{seconds:>6.1} s  {name}: {}", said.as_ref());
        Ok(())
    }

    fn riser(&self, args: &[&str]) -> Result<String, Failure> {
        let mut command = sh::cmd(self.programs.join("riser"), args);
        command.env("XDG_RUNTIME_DIR", self.scratch.path());
        command.env("RISER_STATE_DIR", self.scratch.join("riser"));
        sh::output(&mut command)
    }

    fn serve(&mut self, name: &str) -> Result<(), Failure> {
        self.step(name, |d| {
            let [program, config, log] = [
                d.programs.join("riserd"),
                d.scratch.join("riserd.yaml"),
                d.scratch.join("riserd.log"),
            ];
            let daemon = d.daemon.insert(Daemon::start(&program, &config, &log)?);
            Ok(format!("ready, PID {}", daemon.pid()))
        })
    }

    fn stop(&mut self) -> Result<(), Failure> {
        self.step("stop riserd", |d| {
            d.daemon.take().map_or(Ok(()), Daemon::stop)?;
            Ok("exited on SIGTERM")
        })
    }

    fn restart(&mut self) -> Result<(), Failure> {
        self.stop()?;
        self.serve("start riserd again")
    }

    fn mnt(&self) -> String {
        self.scratch.join("mnt").display().to_string()
    }

    fn first_attach(&mut self) -> Result<(), Failure> {
        self.attach("attach from 127.0.0.2 as a file", &[])?;
        self.step("make an ext4 file system", |d| {
            let lun = d.lun_file()?;
            let mut mkfs = sh::cmd("mkfs.ext4", ["-q", "-F"]);
            // We can't mount a file system if we are not root, so the files are copied when it is
            // created.
            if !sh::is_root() {
                mkfs.arg("-d").arg(d.scratch.join("tree"));
            }
            sh::output(mkfs.arg(&lun))?;
            Ok(match sh::is_root() {
                true => "created",
                false => "created, with the tree",
            })
        })?;
        self.detach("detach")?;
        if !sh::is_root() {
            return Ok(());
        }
        self.mount("mount it", &[])?;
        self.step("copy a tree into it", |d| d.copy_tree("tree"))?;
        self.detach("unmount and detach")
    }

    /// Attaches the LUN again, then checks the file system and compares all files.
    fn second_attach(&mut self, prefix: &str, inject: &[&str]) -> Result<(), Failure> {
        self.attach(&format!("{prefix}attach again"), inject)?;
        self.step(&format!("{prefix}e2fsck -fn"), |d| d.check_file_system())?;
        self.detach(&format!("{prefix}detach"))?;
        if !sh::is_root() {
            return Ok(());
        }
        self.mount(&format!("{prefix}mount"), inject)?;
        self.step(&format!("{prefix}compare every file"), |d| {
            d.compare_tree("tree")
        })?;
        self.detach(&format!("{prefix}unmount and detach"))
    }

    fn write_over_lossy_link(&mut self) -> Result<(), Failure> {
        if !sh::is_root() {
            return Ok(());
        }
        let prefix = "over the lossy link: ";
        self.mount(&format!("{prefix}mount"), &["--inject", LOSSY])?;
        self.step(&format!("{prefix}copy the tree once more"), |d| {
            d.copy_tree("again")
        })?;
        // We compare the copy over a reliable link and after a daemon restart, so that a cache or a
        // retransmission can't hide data corruption.
        self.detach(&format!("{prefix}unmount and detach"))?;
        self.restart()?;
        self.mount("mount", &[])?;
        self.step("compare the second copy", |d| d.compare_tree("again"))?;
        self.detach("unmount and detach")?;
        self.attach("attach", &[])?;
        self.step("e2fsck -fn", |d| d.check_file_system())?;
        self.detach("detach")
    }

    fn check_file_system(&self) -> Result<&'static str, Failure> {
        sh::output(sh::cmd("e2fsck", ["-fn"]).arg(self.lun_file()?))?;
        Ok("clean")
    }

    fn copy_tree(&self, name: &str) -> Result<String, Failure> {
        let mnt = self.scratch.join("mnt");
        let mut copy = sh::cmd("cp", ["-a"]);
        sh::output(copy.arg(self.scratch.join("tree")).arg(mnt.join(name)))?;
        sh::output(sh::cmd("sync", ["-f"]).arg(mnt))?;
        Ok(format!("{} MB", self.megabytes))
    }

    /// Compares a directory of the mounted file system with the tree.
    fn compare_tree(&self, name: &str) -> Result<String, Failure> {
        let mut diff = sh::cmd("diff", ["--recursive", "--no-dereference", "--brief"]);
        diff.arg(self.scratch.join("tree"));
        sh::output(diff.arg(self.scratch.join("mnt").join(name)))?;
        Ok(format!("{} MB are identical", self.megabytes))
    }

    fn attach(&mut self, name: &str, inject: &[&str]) -> Result<(), Failure> {
        self.step(name, |d| {
            let mnt = d.mnt();
            let mut args = vec!["attach", URL, "--fuse", &mnt, "--addr", "127.0.0.2"];
            args.extend(inject);
            d.riser(&args)?;
            let size = fs::metadata(d.lun_file()?)?.len();
            Ok(format!("{} MiB", size >> 20))
        })
    }

    fn detach(&mut self, name: &str) -> Result<(), Failure> {
        self.step(name, |d| d.riser(&["detach", &d.mnt()]).map(|_| "gone"))
    }

    fn mount(&mut self, name: &str, inject: &[&str]) -> Result<(), Failure> {
        self.step(name, |d| {
            let mnt = d.mnt();
            let mut args = vec!["mount", URL, &mnt, "--addr", "127.0.0.2"];
            args.extend(inject);
            d.riser(&args).map(|_| "mounted")
        })
    }

    /// Path of the LUN's file in the FUSE directory.
    fn lun_file(&self) -> Result<PathBuf, Failure> {
        let mut entries = fs::read_dir(self.scratch.join("mnt"))?;
        Ok(entries
            .next()
            .ok_or("the attached directory is empty")??
            .path())
    }

    fn bench(&mut self, seconds: u32) -> Result<(), Failure> {
        let runtime = seconds.to_string();
        self.step("benchmark, 4 KiB random read at depth 32", |d| {
            let options = "-o json bench --addr 127.0.0.2 --rw randread --bs 4k --iodepth 32";
            let words = options.split(' ').chain([URL, "--runtime", &runtime]);
            let json = d.riser(&words.collect::<Vec<_>>())?;
            crate::bench::summary(&json)
        })
    }
}

fn configuration(directory: &Path) -> String {
    format!(
        "backends:\n  disk: {{ kind: file, path: {}/disk.img, size: 1GiB, create: true }}\n{}",
        directory.display(),
        TARGET
    )
}

/// Copies at least `enough` bytes of real files to `to` and returns the number of bytes. The files
/// are sorted, so that every run on this machine will copy the same files.
fn collect(to: &Path, enough: u64) -> Result<u64, Failure> {
    let mut bytes = 0;
    for (number, source) in sources().into_iter().enumerate() {
        for entry in WalkDir::new(&source).sort_by_file_name() {
            if bytes >= enough {
                return Ok(bytes);
            }
            // Skip files that we can't read: we don't depend on specific files.
            let Ok(entry) = entry else {
                continue;
            };
            let target = to.join(number.to_string());
            let target = target.join(entry.path().strip_prefix(&source)?);
            if entry.file_type().is_dir() {
                fs::create_dir_all(&target)?;
            } else if entry.file_type().is_symlink() {
                std::os::unix::fs::symlink(fs::read_link(entry.path())?, &target)?;
            } else if entry.file_type().is_file() && fs::File::open(entry.path()).is_ok() {
                bytes += fs::copy(entry.path(), &target)?;
            }
        }
    }
    Err(format!("found only {bytes} bytes of files to copy, {enough} required").into())
}

/// Directories with real files; the directory with the most variety is first.
fn sources() -> Vec<PathBuf> {
    let home = std::env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::home_dir().map(|home| home.join(".cargo")));
    let registry = home.map(|home| home.join("registry/src"));
    let shared = ["/usr/include", "/usr/share"].map(PathBuf::from);
    let all = registry.into_iter().chain(shared);
    all.filter(|source| source.is_dir()).collect()
}
