//! Uses QEMU's own iSCSI driver as a client: `qemu-img` compares images, and a guest boots from our
//! disk.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;

use crate::cases::Row;
use crate::daemon::Daemon;
use crate::interop::kernel;
use crate::packages::{ensure, needs};
use crate::verbs::has_qemu_driver;
use crate::{Failure, sh};

/// Target name.
const IQN: &str = "iqn.2026-01.org.example:qemu";

/// Disk size in bytes.
const SIZE: u64 = 48 << 20;

/// Text that will be written by the guest to the last block of its disk.
const MARK: &str = "written by the guest";

/// Init script of the guest, used to read the whole disk, write to it and shut down.
const INIT: &str = include_str!("init.sh");

const LOADER: &str = "SERIAL 0 115200\nDEFAULT riser\nLABEL riser\n  LINUX vmlinuz\n  INITRD initrd\n  \
                      APPEND console=ttyS0 quiet panic=-1 mitigations=off\n";

/// Names of the checks.
pub(super) const CHECKS: [&str; 2] = ["qemu-img", "boot from iscsi://"];

/// Runs the checks with a new daemon. Returns the reason if a required program is not
/// available.
pub(super) fn run(programs: &Path, scratch: &sh::Scratch) -> Result<Vec<Row>, String> {
    if let Some(n) = ensure(needs("conformance-qemu")).first() {
        return Err(format!(
            "{} (Debian package {}) is missing",
            n.program, n.package
        ));
    }
    if !has_qemu_driver() {
        return Err("qemu-img cannot load its iSCSI driver".to_owned());
    }
    let booted = kernel::ensure().map_err(|e| format!("cannot prepare the guest's kernel: {e}"))?;
    Ok(vec![
        Row::check(CHECKS[0], || images(programs, scratch)),
        Row::check(CHECKS[1], || boot(programs, scratch, &booted)),
    ])
}

fn serve(
    programs: &Path,
    scratch: &sh::Scratch,
    image: &Path,
) -> Result<(Daemon, String), Failure> {
    let port = crate::tgt::free_port()?;
    let config = scratch.join("qemu.yaml");
    fs::write(
        &config,
        format!(
            "backends:\n  disk: {{ kind: file, path: {} }}\n\
             targets:\n  - name: qemu\n    iqn: {IQN}\n    \
             portals: [{{ protocol: iscsi, listen: \"127.0.0.1:{port}\" }}]\n    \
             luns: {{ 0: disk }}\n    access: open\nadmin: {{ socket: none }}\n",
            image.display()
        ),
    )?;
    let daemon = Daemon::start(&programs.join("riserd"), &config, &scratch.join("qemu.log"))?;
    Ok((daemon, format!("iscsi://127.0.0.1:{port}/{IQN}/0")))
}

/// Copies an image to the disk and compares it. The comparison must also find a single changed
/// byte.
fn images(programs: &Path, scratch: &sh::Scratch) -> Result<String, Failure> {
    let (image, disk) = (scratch.join("image"), scratch.join("qemu.img"));
    // Use different data for each block, so that we can detect a block at the wrong offset, but
    // always the same data in every run.
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut bytes = vec![0; SIZE as usize];
    // Leave a hole for every fourth MiB.
    for (i, byte) in bytes
        .iter_mut()
        .enumerate()
        .filter(|(i, _)| (i >> 20) % 4 != 3)
    {
        state = state
            .wrapping_mul(0x5851_f42d_4c95_7f2d)
            .wrapping_add(i as u64);
        *byte = (state >> 56) as u8;
    }
    fs::write(&image, &bytes)?;
    File::create(&disk)?.set_len(SIZE)?;
    let (daemon, url) = serve(programs, scratch, &disk)?;
    let image = image.display().to_string();
    let raw = ["-f", "raw"];
    sh::output(
        sh::cmd("qemu-img", ["convert", "-n"])
            .args(raw)
            .args(["-O", "raw", &image, &url]),
    )?;
    let compare = || {
        sh::output(
            sh::cmd("qemu-img", ["compare"])
                .args(raw)
                .args(["-F", "raw", &image, &url]),
        )
    };
    let said = compare()?;
    // We also need to check the file itself: if the same client uses a wrong offset for both write
    // and read, its own comparison would still succeed.
    if fs::read(&disk)? != bytes {
        return Err("data written by qemu-img are missing in riserd's file".into());
    }
    let mut changed = File::options().write(true).open(&image)?;
    changed.seek(SeekFrom::Start(SIZE / 2))?;
    changed.write_all(&[bytes[SIZE as usize / 2] ^ 1])?;
    if compare().is_ok() {
        return Err("qemu-img finds different images identical".into());
    }
    daemon.stop()?;
    Ok(said.trim().to_owned())
}

/// Boots a guest from our disk, starting at the boot sector. It has no other disk.
fn boot(
    programs: &Path,
    scratch: &sh::Scratch,
    kernel: &kernel::Kernel,
) -> Result<String, Failure> {
    let directory = scratch.join("boot");
    fs::create_dir_all(&directory)?;
    let init = directory.join("init");
    fs::write(&init, INIT.replace("MARK", MARK))?;
    let initrd = kernel.initramfs(&directory, &init, &["virtio_pci", "virtio_blk"])?;
    let loader = directory.join("syslinux.cfg");
    fs::write(&loader, LOADER)?;
    let disk = directory.join("disk.img");
    File::create(&disk)?.set_len(SIZE)?;
    let image = disk.display().to_string();
    sh::output(&mut sh::cmd("mformat", ["-i", &image, "-F", "::"]))?;
    for (from, name) in [
        (&kernel.image, "vmlinuz"),
        (&initrd, "initrd"),
        (&loader, "syslinux.cfg"),
    ] {
        let mut copy = sh::cmd("mcopy", ["-i", &image]);
        sh::output(copy.arg(from).arg(format!("::{name}")))?;
    }
    sh::output(&mut sh::cmd("syslinux", ["--install", &image]))?;
    // We need to calculate the checksum before the guest is started, because it will write to the
    // disk.
    let sum = sh::output(&mut sh::cmd("sha256sum", [&disk]))?;
    let sum = sum.split_whitespace().next().unwrap_or_default().to_owned();
    let (daemon, url) = serve(programs, scratch, &disk)?;
    let said = sh::output(
        sh::cmd(
            "timeout",
            ["240", "qemu-system-x86_64", "-accel", "tcg", "-m", "512"],
        )
        .args(["-nographic", "-no-reboot", "-nic", "none"])
        .args(["-drive", &format!("if=none,id=disk,format=raw,file={url}")])
        .args(["-device", "virtio-blk-pci,drive=disk,bootindex=0"]),
    )?;
    daemon.stop()?;
    if !said.contains(&format!("DISK {sum}")) {
        return Err(format!("the guest read wrong data from its disk:\n{said}").into());
    }
    let mut end = File::open(&disk)?;
    end.seek(SeekFrom::End(-512))?;
    let mut block = Vec::new();
    end.read_to_end(&mut block)?;
    if !block.starts_with(MARK.as_bytes()) {
        return Err("data written by the guest are missing in riserd's file".into());
    }
    Ok("a guest booted, read its whole disk and wrote to it".to_owned())
}
