//! QEMU's own iSCSI driver as a client: `qemu-img` compares images, and a guest boots from our
//! disk.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::daemon::Daemon;
use crate::interop::{initramfs, kernel};
use crate::packages::{self, Need, ensure, need};
use crate::{Failure, sh};

pub(super) const NEEDS: &[Need] = &[
    need("qemu-img", "qemu-utils", "QEMU's iSCSI driver"),
    need(
        "qemu-system-x86_64",
        "qemu-system-x86",
        "a guest that boots from an iSCSI disk",
    ),
    need("syslinux", "syslinux", "the guest's boot loader"),
    need("mformat", "mtools", "the guest's disk"),
    need("busybox", "busybox-static", "the guest's programs"),
    need("cpio", "cpio", "the guest's initramfs"),
    need("depmod", "kmod", "the guest's modules"),
    need("modprobe", "kmod", "the guest's modules"),
    need("xz", "xz-utils", "the guest's modules"),
];

/// QEMU's block driver, which comes in a package of its own.
const DRIVER: &str = "qemu-block-extra";

/// Name of the target.
const IQN: &str = "iqn.2026-01.org.example:qemu";

/// Bytes of the disk.
const SIZE: u64 = 48 << 20;

/// Text that the guest leaves in the last block of its disk.
const MARK: &str = "written by the guest";

/// The guest's first program: reads its whole disk, writes to it, and leaves.
const INIT: &str = r#"#!/bin/busybox sh
export PATH=/bin
/bin/busybox mkdir -p /proc /dev
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t devtmpfs dev /dev
for module in $(/bin/busybox cat /modules/order); do /bin/busybox insmod "/modules/$module"; done
/bin/busybox echo "DISK $(/bin/busybox sha256sum </dev/vda)"
blocks=$(/bin/busybox blockdev --getsz /dev/vda)
/bin/busybox echo "MARK" | /bin/busybox dd of=/dev/vda bs=512 seek=$((blocks - 1)) conv=sync,fsync
/bin/busybox poweroff -f
"#;

const LOADER: &str = "SERIAL 0 115200\nDEFAULT riser\nLABEL riser\n  LINUX vmlinuz\n  INITRD initrd\n  \
                      APPEND console=ttyS0 quiet panic=-1 mitigations=off\n";

/// Result of one check, or its failure.
pub(super) type Outcome = (&'static str, Result<String, Failure>);

/// Names of the checks.
pub(super) const CHECKS: [&str; 2] = ["qemu-img", "boot from iscsi://"];

/// Runs the checks with a daemon of their own; why not, if something is not to be had here.
pub(super) fn run(programs: &Path, scratch: &sh::Scratch) -> Result<Vec<Outcome>, String> {
    if let Some(n) = ensure(NEEDS).first() {
        return Err(format!(
            "{} (Debian package {}) is missing",
            n.program, n.package
        ));
    }
    if !has_driver() {
        return Err(format!("qemu-img knows no iSCSI (Debian package {DRIVER})"));
    }
    let booted = kernel::ensure().map_err(|e| format!("no kernel for the guest: {e}"))?;
    Ok(vec![
        (CHECKS[0], images(programs, scratch)),
        (CHECKS[1], boot(programs, scratch, &booted)),
    ])
}

/// Returns whether QEMU's tools speak iSCSI, over TCP and iSER; installs the driver if it may.
fn has_driver() -> bool {
    // What the tools list they may still not have, and no target listens at this port. A QEMU of
    // before 8 reports an unknown protocol, a newer one a module that it cannot load.
    let knows = || {
        let unserved = "iscsi://127.0.0.1:1/iqn.2026-01.org.example:none/0";
        let answer = sh::output(&mut sh::cmd("qemu-img", ["info", unserved]));
        answer.is_err_and(|error| {
            let error = error.to_string();
            !error.contains("Unknown protocol") && !error.contains("Unable to load module")
        })
    };
    // The package has no program by whose name it could be looked for.
    knows() || {
        let _ = install_driver().inspect_err(|e| println!("{DRIVER}: {e}"));
        knows()
    }
}

/// Installs the driver in the version of the tools, which load no other. A QEMU from the backports
/// suite is often left where that suite is no longer among the sources.
fn install_driver() -> Result<(), Failure> {
    let query = ["-W", "-f", "${Version}", "qemu-utils"];
    let version = sh::output(&mut sh::cmd("dpkg-query", query))?;
    let package = format!("{DRIVER}={}", version.trim());
    let purpose = || "iSCSI in QEMU's tools".to_owned();
    if !version.contains("~bpo") {
        packages::install(&[(&package, purpose())]);
        return Ok(());
    }
    let archive = kernel::download(&package)?;
    packages::install(&[(&archive.display().to_string(), purpose())]);
    fs::remove_file(&archive)?;
    Ok(())
}

/// A `riserd` that serves a file, and the file's address.
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

/// An image goes in and is the same; one changed byte is found.
fn images(programs: &Path, scratch: &sh::Scratch) -> Result<String, Failure> {
    let (image, disk) = (scratch.join("image"), scratch.join("qemu.img"));
    // Bytes that differ from block to block, so that one at a wrong place is found; the same in
    // every run.
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut bytes = vec![0; SIZE as usize];
    // Every fourth MiB stays a hole.
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
    // Beside the comparison by the same client: one that wrote and read at the same wrong place
    // would find its data equal.
    if fs::read(&disk)? != bytes {
        return Err("what qemu-img wrote is not in riserd's file".into());
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

/// Boots a guest whose only disk is ours, from its boot sector on.
fn boot(
    programs: &Path,
    scratch: &sh::Scratch,
    kernel: &kernel::Kernel,
) -> Result<String, Failure> {
    let folder = scratch.join("boot");
    fs::create_dir_all(&folder)?;
    let init = folder.join("init");
    fs::write(&init, INIT.replace("MARK", MARK))?;
    fs::set_permissions(&init, fs::Permissions::from_mode(0o755))?;
    let initrd = initramfs::build(kernel, &folder, &init, &["virtio_pci", "virtio_blk"])?;
    let loader = folder.join("syslinux.cfg");
    fs::write(&loader, LOADER)?;
    let disk = folder.join("disk.img");
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
    // The sum is taken before the guest starts, which writes to the disk.
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
        return Err(format!("the guest does not see its disk as it is:\n{said}").into());
    }
    let mut end = File::open(&disk)?;
    end.seek(SeekFrom::End(-512))?;
    let mut block = Vec::new();
    end.read_to_end(&mut block)?;
    if !block.starts_with(MARK.as_bytes()) {
        return Err("what the guest wrote is not in riserd's file".into());
    }
    Ok("a guest booted, read its whole disk and wrote to it".to_owned())
}
