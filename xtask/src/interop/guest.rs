//! A running guest. We send scripts to it and receive their output and exit status.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::kernel::Kernel;
use crate::process::Process;
use crate::{Failure, root, sh};

/// Maximum boot time; if the machine is under load, a boot takes several times the usual 15
/// seconds.
const BOOT: Duration = Duration::from_secs(240);

/// Modules required before the host file system can be mounted.
const MODULES: [&str; 4] = ["virtio_pci", "9pnet_virtio", "9p", "overlay"];

/// Size of the guest's disk `/dev/vda`. The guest has to load `virtio_blk` to use it.
const DISK: u64 = 256 << 20;

/// Number of virtual CPUs, and memory size in MiB.
const CPUS: &str = "2";
const MEMORY: &str = "6144";

/// Share directory with files that should be installed to the root file system by later boots.
const INSTALLED: &str = "installed";

/// Init program of the guest.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Init {
    /// `guest.sh`.
    Script,
    /// systemd, with `guest.sh` as a service.
    Systemd,
    /// Same as `Systemd`, but keep the disk and the installed files from the previous boot.
    SystemdAgain,
}

/// A running guest. It will be killed on drop.
pub(crate) struct Guest {
    qemu: Process,
    share: PathBuf,
    next: u32,
}

/// Result of a script.
pub(crate) struct Ran {
    pub(crate) status: i32,
    pub(crate) output: String,
}

impl Guest {
    /// Boots a guest using the shared directory `directory/share`, which is mounted as `/vm` in the
    /// guest.
    pub(crate) fn boot(kernel: &Kernel, directory: &Path, init: Init) -> Result<Self, Failure> {
        // We need to clear the directory: the guest runs scripts by number, so it would start
        // with the scripts of a previous guest.
        let share = directory.join("share");
        let disk = directory.join("disk.img");
        if init != Init::SystemdAgain {
            let _ = fs::remove_dir_all(&share);
            fs::create_dir_all(&share)?;
            File::create(&disk)?.set_len(DISK)?;
        }
        for entry in fs::read_dir(&share)? {
            let entry = entry?;
            if entry.file_name() == INSTALLED {
                continue;
            }
            match entry.file_type()?.is_dir() {
                true => fs::remove_dir_all(entry.path())?,
                false => fs::remove_file(entry.path())?,
            }
        }
        let scripts = root().join("tests/vm");
        for entry in fs::read_dir(&scripts)? {
            let script = entry?.path();
            if script.extension().is_some_and(|e| e == "sh") {
                fs::copy(&script, share.join(script.file_name().unwrap_or_default()))?;
            }
        }
        fs::write(
            share.join("modules"),
            kernel.modules().display().to_string(),
        )?;
        let initrd = kernel.initramfs(directory, &scripts.join("init.sh"), &MODULES)?;
        // The guest uses the host's file system, so it has the same programs and libraries and we
        // don't need an image. `multidevs=remap` is set to avoid inode collisions between file
        // systems.
        let virtfs = |path: &Path, tag: &str, more: &str| {
            format!(
                "local,path={},mount_tag={tag},security_model=none,multidevs=remap{more}",
                path.display()
            )
        };
        let mut qemu = sh::cmd("qemu-system-x86_64", ["-accel", "tcg,thread=multi"]);
        qemu.args(["-cpu", "max"])
            .args(["-smp", CPUS, "-m", MEMORY])
            // Don't add a network card: both sides of a test are in the guest, and we must never
            // send packets to the host's network.
            .args(["-nographic", "-no-reboot", "-nic", "none"])
            .arg("-kernel")
            .arg(&kernel.image)
            .arg("-initrd")
            .arg(initrd)
            // With `-no-reboot`, the guest exits immediately on a panic and we don't have to wait
            // for a timeout. We disable mitigations because they cost time and we only run trusted
            // code. If the host is busy, timer ticks can be delayed, and then the timer check would
            // stop the boot.
            .arg("-append")
            .arg(format!(
                "console=ttyS0 panic=-1 mitigations=off no_timer_check quiet RIG_INIT={}",
                match init {
                    Init::Script => "guest.sh",
                    Init::Systemd | Init::SystemdAgain =>
                        "systemd.sh systemd.unit=multi-user.target",
                }
            ))
            .arg("-drive")
            .arg(format!("file={},format=raw,if=virtio", disk.display()))
            .args([
                "-virtfs",
                &virtfs(Path::new("/"), "hostroot", ",readonly=on"),
            ])
            .args(["-virtfs", &virtfs(&share, "share", "")]);
        // This ensures that the guest is killed if we are killed.
        let qemu = sh::ending_with_us(qemu, "KILL");
        let mut guest = Self {
            qemu: Process::start(qemu, &directory.join("console.log"))?,
            share,
            next: 1,
        };
        // The boot has completed when we can run a script. We also use this to verify that the
        // running kernel matches the modules in the initramfs.
        let hello = guest.run("uname -r", BOOT)?;
        if hello.output.trim() != kernel.version {
            return Err(format!(
                "the guest runs {}, not {}",
                hello.output.trim(),
                kernel.version
            )
            .into());
        }
        Ok(guest)
    }

    pub(crate) fn share(&self) -> &Path {
        &self.share
    }

    /// Shuts down the guest and waits until it's off.
    pub(crate) fn power_off(mut self, limit: Duration) -> Result<(), Failure> {
        fs::write(self.share.join("stop"), "")?;
        match self.qemu.finish(Instant::now() + limit).status {
            Some(_) => Ok(()),
            None => Err(format!("the guest did not power off within {limit:?}").into()),
        }
    }

    pub(crate) fn run(&mut self, script: &str, limit: Duration) -> Result<Ran, Failure> {
        let n = self.next;
        self.next += 1;
        let at = |suffix: &str| self.share.join(format!("{n}.{suffix}"));
        // Use a temporary name first: the guest reads a script as soon as the file exists, so it
        // could be incomplete.
        fs::write(at("new"), script)?;
        fs::rename(at("new"), at("sh"))?;
        let started = Instant::now();
        while started.elapsed() < limit {
            if let Ok(status) = fs::read_to_string(at("status")) {
                let output = String::from_utf8_lossy(&fs::read(at("out"))?).into_owned();
                return Ok(Ran {
                    status: status.trim().parse()?,
                    output,
                });
            }
            if self.qemu.has_exited()? {
                return Err(self.qemu.failure("exited"));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let sofar = fs::read(at("out")).unwrap_or_default();
        Err(format!(
            "not finished within {limit:?}; output so far:\n{}",
            String::from_utf8_lossy(&sofar)
        )
        .into())
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // Request a shutdown and wait for two seconds, so that the guest can flush its data.
        let _ = fs::write(self.share.join("stop"), "");
        self.qemu.finish(Instant::now() + Duration::from_secs(2));
    }
}
