//! A Debian kernel with the modules that interop needs, from the archive by package name.
//!
//! It comes from the backports suite of the release that this machine runs, through a private set
//! of apt lists, and is unpacked once into the user's cache folder.

use std::fs;
use std::path::{Path, PathBuf};

use crate::packages::cache;
use crate::{Failure, sh};

/// The package that names the kernel.
const META_PACKAGE: &str = "linux-image-amd64";

/// Kernel package that is unpacked.
pub(crate) struct Kernel {
    /// Path of the bootable image.
    pub(crate) image: PathBuf,
    /// The folder with `lib/modules/VERSION` below it.
    pub(crate) root: PathBuf,
    /// Its release, as `uname -r` says.
    pub(crate) version: String,
}

impl Kernel {
    /// The folder of its modules.
    pub(crate) fn modules(&self) -> PathBuf {
        self.root.join("lib/modules").join(&self.version)
    }
}

/// Answers the kernel, fetching it if the cache has none.
pub(crate) fn ensure() -> Result<Kernel, Failure> {
    let root = cache().join("kernel");
    if let Some(kernel) = find(&root) {
        return Ok(kernel);
    }
    let apt = PrivateApt::new()?;
    let depends = apt.run("apt-cache", &["depends", META_PACKAGE])?;
    let package = depends
        .lines()
        .find_map(|l| l.trim().strip_prefix("Depends: "))
        .ok_or("the backports suite names no kernel")?
        .to_owned();
    println!("fetching Debian package {package}");
    let archive = apt.download(&package)?;
    // Unpacked beside its place and renamed: a run that is ended meanwhile leaves no half kernel
    // for the next one.
    let unpacking = cache().join(format!("kernel-{}", std::process::id()));
    let _ = fs::remove_dir_all(&unpacking);
    sh::output(sh::cmd("dpkg", ["-x"]).arg(&archive).arg(&unpacking))?;
    let version = package.trim_start_matches("linux-image-").to_owned();
    sh::output(sh::cmd("depmod", ["-b"]).arg(&unpacking).arg(&version))?;
    let _ = fs::remove_dir_all(&root);
    fs::rename(&unpacking, &root)?;
    fs::remove_file(&archive)?;
    // Looked for as at the beginning, so that a package of another layout is noticed now and not
    // at the boot.
    find(&root).ok_or_else(|| "the kernel package has no kernel in it".into())
}

fn find(root: &Path) -> Option<Kernel> {
    let image = fs::read_dir(root.join("boot"))
        .ok()?
        .filter_map(Result::ok)
        .map(|e| e.path())
        .find(|p| {
            p.file_name()
                .is_some_and(|n| n.to_string_lossy().starts_with("vmlinuz-"))
        })?;
    let version = image
        .file_name()?
        .to_string_lossy()
        .trim_start_matches("vmlinuz-")
        .to_owned();
    root.join("lib/modules")
        .join(&version)
        .join("modules.dep")
        .exists()
        // `modules.dep` is what is made last, so a folder that has it is complete.
        .then(|| Kernel {
            image,
            root: root.to_path_buf(),
            version,
        })
}

/// Downloads a package from the backports suite, `NAME` or `NAME=VERSION`, and returns the path of
/// its archive.
pub(crate) fn download(package: &str) -> Result<PathBuf, Failure> {
    PrivateApt::new()?.download(package)
}

/// An apt that knows only the backports suite and keeps its lists in a folder of ours.
pub(super) struct PrivateApt {
    folder: PathBuf,
}

impl PrivateApt {
    pub(super) fn new() -> Result<Self, Failure> {
        let folder = cache().join("apt");
        for sub in ["parts", "lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(folder.join(sub))?;
        }
        let release = fs::read_to_string("/etc/os-release")?;
        let codename = release
            .lines()
            .find_map(|l| l.strip_prefix("VERSION_CODENAME="))
            .ok_or("/etc/os-release names no release")?
            .to_owned();
        // The mirror is the one that this host uses, so that a proxy or a local copy serves here,
        // too; the rest of the host's apt is left alone.
        let targets = sh::output(&mut sh::cmd(
            "apt-get",
            [
                "indextargets",
                "--format",
                "$(CREATED_BY)|$(CODENAME)|$(REPO_URI)",
            ],
        ))?;
        let archive = targets
            .lines()
            .find_map(|l| l.strip_prefix(&format!("Packages|{codename}|")))
            .ok_or_else(|| format!("apt has no source for {codename}"))?;
        let keys = "/usr/share/keyrings/debian-archive-keyring.gpg";
        fs::write(
            folder.join("parts/backports.list"),
            format!("deb [signed-by={keys}] {archive} {codename}-backports main\n"),
        )?;
        let apt = Self { folder };
        apt.run("apt-get", &["update", "-qq"])?;
        Ok(apt)
    }

    pub(super) fn download(&self, package: &str) -> Result<PathBuf, Failure> {
        self.run("apt-get", &["download", package])?;
        let name = package.split('=').next().unwrap_or_default();
        let is_it = |path: &PathBuf| {
            let file = path.file_name().unwrap_or_default().to_string_lossy();
            file.starts_with(&format!("{name}_")) && file.ends_with(".deb")
        };
        fs::read_dir(&self.folder)?
            .filter_map(Result::ok)
            .map(|e| e.path())
            .find(is_it)
            .ok_or_else(|| format!("the package {package} did not arrive").into())
    }

    fn run(&self, program: &str, args: &[&str]) -> Result<String, Failure> {
        let at = |name: &str| self.folder.join(name).display().to_string();
        let settings = [
            "Dir::Etc::sourcelist=/dev/null".to_owned(),
            format!("Dir::Etc::sourceparts={}", at("parts")),
            format!("Dir::State::Lists={}", at("lists")),
            format!("Dir::Cache={}", at("cache")),
            // The cache may be in a home that apt's own user cannot enter.
            "APT::Sandbox::User=root".to_owned(),
        ];
        let mut command = sh::cmd(program, settings.iter().flat_map(|s| ["-o", s.as_str()]));
        sh::output(command.args(args).current_dir(&self.folder))
    }
}
