//! Downloads a Debian kernel with the required modules, by package name.
//!
//! We use the backports suite for the release of this machine with a private set of apt lists. The
//! package is only unpacked once, to the user's cache directory.

use std::fs;
use std::path::{Path, PathBuf};

use crate::packages::{cache, codename, find_archive};
use crate::{Failure, root, sh};

/// Metapackage that depends on the current kernel.
const META_PACKAGE: &str = "linux-image-amd64";

/// An unpacked kernel package.
pub(crate) struct Kernel {
    pub(crate) image: PathBuf,
    /// Directory that contains `lib/modules/VERSION`.
    pub(crate) root: PathBuf,
    /// Kernel release as reported by `uname -r`.
    pub(crate) version: String,
}

impl Kernel {
    pub(crate) fn modules(&self) -> PathBuf {
        self.root.join("lib/modules").join(&self.version)
    }

    /// Creates an initramfs in a directory, with the program that the guest starts first and these
    /// modules (`tests/vm/initramfs.sh`).
    pub(crate) fn initramfs(
        &self,
        directory: &Path,
        init: &Path,
        modules: &[&str],
    ) -> Result<PathBuf, Failure> {
        let mut script = sh::cmd("bash", [root().join("tests/vm/initramfs.sh")]);
        script
            .args([directory, init, &self.root])
            .arg(&self.version);
        sh::output(script.args(modules))?;
        Ok(directory.join("initramfs.cpio"))
    }
}

/// Returns the kernel. If it's not in the cache, it will be downloaded.
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
        .ok_or("the backports suite has no kernel")?
        .to_owned();
    println!("fetching Debian package {package}");
    let archive = apt.download(&package)?;
    // Unpack to a temporary directory in the cache and rename it, so that an interrupted run
    // doesn't leave an incomplete kernel.
    let unpacking = cache().join(format!("kernel-{}", std::process::id()));
    let _ = fs::remove_dir_all(&unpacking);
    sh::output(sh::cmd("dpkg", ["-x"]).arg(&archive).arg(&unpacking))?;
    let version = package.trim_start_matches("linux-image-").to_owned();
    sh::output(sh::cmd("depmod", ["-b"]).arg(&unpacking).arg(&version))?;
    let _ = fs::remove_dir_all(&root);
    fs::rename(&unpacking, &root)?;
    fs::remove_file(&archive)?;
    // Search for it again, so that we detect an unexpected package layout now instead of at boot.
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
        // `modules.dep` is created at the end, so if it exists, the directory is complete.
        .then(|| Kernel {
            image,
            root: root.to_path_buf(),
            version,
        })
}

/// An apt configuration that only contains the backports suite and keeps its lists in our own
/// directory.
pub(super) struct PrivateApt {
    directory: PathBuf,
}

impl PrivateApt {
    pub(super) fn new() -> Result<Self, Failure> {
        let directory = cache().join("apt");
        for sub in ["parts", "lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(directory.join(sub))?;
        }
        let codename = codename()?;
        // Use the same mirror as this host, because it may require a proxy or use a local copy. No
        // other apt settings are used.
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
            directory.join("parts/backports.list"),
            format!("deb [signed-by={keys}] {archive} {codename}-backports main\n"),
        )?;
        let apt = Self { directory };
        apt.run("apt-get", &["update", "-qq"])?;
        Ok(apt)
    }

    pub(super) fn download(&self, package: &str) -> Result<PathBuf, Failure> {
        self.run("apt-get", &["download", package])?;
        find_archive(&self.directory, package)
    }

    fn run(&self, program: &str, args: &[&str]) -> Result<String, Failure> {
        let at = |name: &str| self.directory.join(name).display().to_string();
        let settings = [
            "Dir::Etc::sourcelist=/dev/null".to_owned(),
            format!("Dir::Etc::sourceparts={}", at("parts")),
            format!("Dir::State::Lists={}", at("lists")),
            format!("Dir::Cache={}", at("cache")),
            // The cache may be in a home directory that apt's own user can't access.
            "APT::Sandbox::User=root".to_owned(),
        ];
        let mut command = sh::cmd(program, settings.iter().flat_map(|s| ["-o", s.as_str()]));
        sh::output(command.args(args).current_dir(&self.directory))
    }
}
