//! A booted guest: scripts go in, their output and exit status come out.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use super::{initramfs, kernel::Kernel};
use crate::{Failure, root, sh};

/// Longest time of a boot; a loaded machine needs several times the usual 15 seconds.
const BOOT: Duration = Duration::from_secs(240);

/// Modules that must be there before the host's file system is.
const MODULES: [&str; 4] = ["virtio_pci", "9pnet_virtio", "9p", "overlay"];

/// Shape of a virtual machine.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    /// Number of virtual CPUs.
    pub(crate) cpus: u32,
    /// Size of the memory, in MiB.
    pub(crate) memory: u32,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            cpus: 2,
            memory: 6144,
        }
    }
}

/// A running guest. It is ended when the value goes.
pub(crate) struct Guest {
    qemu: Child,
    share: PathBuf,
    next: u32,
}

/// Result of a script.
pub(crate) struct Ran {
    /// Exit status of the script.
    pub(crate) status: i32,
    /// Output of the script.
    pub(crate) output: String,
}

impl Guest {
    /// Boots a guest whose shared folder is `folder/share`; it appears as `/vm` inside.
    pub(crate) fn boot(kernel: &Kernel, folder: &Path, shape: Shape) -> Result<Self, Failure> {
        // Emptied first: the guest runs what it finds there by number, and would begin with the
        // scripts of an earlier one.
        let share = folder.join("share");
        let _ = fs::remove_dir_all(&share);
        fs::create_dir_all(&share)?;
        for name in [
            "crash.sh",
            "guest.sh",
            "iscsi.sh",
            "lib.sh",
            "libiscsi.sh",
            "lio.sh",
            "targetcli.sh",
            "tgt.sh",
        ] {
            fs::copy(root().join("tests/vm").join(name), share.join(name))?;
        }
        fs::write(
            share.join("modules"),
            kernel.modules().display().to_string(),
        )?;
        let initrd = initramfs::build(kernel, folder, &root().join("tests/vm/init.sh"), &MODULES)?;
        let console = File::create(folder.join("console.log"))?;
        // The host's file system is the guest's, so that it has the same programs and libraries
        // without an image. `multidevs=remap` keeps inodes of several file systems apart.
        let virtfs = |path: &Path, tag: &str, more: &str| {
            format!(
                "local,path={},mount_tag={tag},security_model=none,multidevs=remap{more}",
                path.display()
            )
        };
        // A run that is killed leaves no guest behind.
        let qemu = sh::cmd("setpriv", ["--pdeathsig", "KILL", "qemu-system-x86_64"])
            .args(["-accel", "tcg,thread=multi", "-cpu", "max"])
            .args([
                "-smp",
                &shape.cpus.to_string(),
                "-m",
                &shape.memory.to_string(),
            ])
            // No network card: both ends of a case are in the guest, and nothing of it may reach
            // the host's network.
            .args(["-nographic", "-no-reboot", "-nic", "none"])
            .arg("-kernel")
            .arg(&kernel.image)
            .arg("-initrd")
            .arg(initrd)
            // A panic ends the guest at once (`-no-reboot`), instead of a time-out. Mitigations
            // cost time where no foreign code runs. Where other work takes the host's time, ticks come
            // so late that a check of the timer would stop the boot.
            .args([
                "-append",
                "console=ttyS0 panic=-1 mitigations=off no_timer_check quiet",
            ])
            .args([
                "-virtfs",
                &virtfs(Path::new("/"), "hostroot", ",readonly=on"),
            ])
            .args(["-virtfs", &virtfs(&share, "share", "")])
            .stdin(Stdio::null())
            .stdout(console.try_clone()?)
            .stderr(console)
            .spawn()
            .map_err(|e| format!("qemu-system-x86_64: {e}"))?;
        let mut guest = Self {
            qemu,
            share,
            next: 1,
        };
        // The boot is over when a script runs. Its answer also shows that the kernel is the one
        // whose modules are in the initramfs.
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

    /// The folder that the guest sees as `/vm`.
    pub(crate) fn share(&self) -> &Path {
        &self.share
    }

    /// Runs a script to its end.
    pub(crate) fn run(&mut self, script: &str, limit: Duration) -> Result<Ran, Failure> {
        let n = self.next;
        self.next += 1;
        let at = |suffix: &str| self.share.join(format!("{n}.{suffix}"));
        // Under another name first: the guest takes a script as soon as its name is there, and
        // could read half of it.
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
            if let Some(status) = self.qemu.try_wait()? {
                return Err(format!("the guest ended ({status})").into());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let sofar = fs::read(at("out")).unwrap_or_default();
        Err(format!(
            "no end within {limit:?}; so far:\n{}",
            String::from_utf8_lossy(&sofar)
        )
        .into())
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // The guest is asked first, so that it can write out what it has. It gets two seconds for
        // that.
        let _ = fs::write(self.share.join("stop"), "");
        for _ in 0..40 {
            if matches!(self.qemu.try_wait(), Ok(Some(_))) {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}
