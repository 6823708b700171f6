//! The configuration of `riserd run --serve`, which serves disks without a configuration file.

use std::net::IpAddr;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde_json::{Map, Value, json};

use crate::config::HostId;
use crate::control::state;

/// Name of the configuration in messages.
pub(super) const ORIGIN: &str = "--serve";

/// iSCSI name of the target.
const IQN: &str = "iqn.2026-01.com.example:riser";

/// A disk: a file or a block device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Disk {
    path: PathBuf,
    /// Size of the file, such as `1GiB`. The configuration parser checks it.
    size: Option<String>,
    /// Create the file, or extend it to `size`.
    create: bool,
    read_only: bool,
}

/// Parses `PATH[,size=SIZE][,create][,read_only]`.
impl FromStr for Disk {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut words = text.split(',');
        let path = words.next().unwrap_or_default();
        if path.is_empty() {
            return Err("missing path of the disk".to_owned());
        }
        let mut disk = Self {
            path: path.into(),
            size: None,
            create: false,
            read_only: false,
        };
        for word in words {
            match word.split_once('=') {
                Some(("size", _)) if disk.size.is_some() => {
                    return Err("size is specified more than once".to_owned());
                }
                Some(("size", size)) => disk.size = Some(size.to_owned()),
                None if word == "create" => disk.create = true,
                None if word == "read_only" => disk.read_only = true,
                _ => {
                    return Err(format!(
                        "unknown option `{word}`: the options are size=SIZE, create and read_only; \
                         a path that contains a comma requires a configuration file"
                    ));
                }
            }
        }
        if disk.create && disk.size.is_none() {
            return Err("create requires size=SIZE".to_owned());
        }
        Ok(disk)
    }
}

/// Returns the absolute path of a disk, because the next start may use another working directory.
/// The path of a file contains no symbolic links, if possible.
///
/// Links to a device are kept, because they are often its only permanent names: at the next boot,
/// the kernel may assign a name such as `/dev/sda` to another disk.
fn permanent_path(path: &Path, is_device: bool) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    if is_device {
        return path;
    }
    let resolve = |path: &Path| path.canonicalize().ok();
    // The file itself may not exist yet.
    let in_directory = || Some(resolve(path.parent()?)?.join(path.file_name()?));
    let resolved = resolve(&path).or_else(in_directory);
    resolved.unwrap_or(path)
}

impl Disk {
    fn is_device(&self) -> bool {
        let metadata = self.path.metadata();
        metadata.is_ok_and(|metadata| metadata.file_type().is_block_device())
    }

    /// Returns the configuration of the backend with this path.
    fn backend(&self, path: &str) -> Value {
        let mut backend = json!({
            "kind": if self.is_device() { "device" } else { "file" },
            "path": path,
            "read_only": self.read_only,
        });
        if let Some(size) = &self.size {
            backend["size"] = json!(size);
        }
        if self.create {
            backend["create"] = json!(true);
        }
        backend
    }
}

/// Returns the backend name for a path. The serial number and the reservations of a disk belong to
/// this name, so it must not be used for any other disk.
fn backend_name(path: &Path) -> String {
    const MAX_LEN: usize = 40;
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let name: String = name
        .chars()
        .filter(|&c| is_allowed(c))
        .take(MAX_LEN)
        .collect();
    let hash = HostId::new("").derive("path", &path.to_string_lossy());
    format!("{name}:{:08x}", hash >> 32)
}

fn utf8_of(path: &Path) -> Result<&str, String> {
    path.to_str()
        .ok_or_else(|| format!("invalid path {}: it is not UTF-8", path.display()))
}

/// Returns a configuration with a single target, which serves the disks over iSCSI, iSER and SRP to
/// all initiators that can reach an address in `listen`. JSON is also YAML.
///
/// A daemon with a configuration file uses the state directory itself, so this uses a directory in
/// it.
///
/// # Errors
/// Returns a message if a path is not UTF-8, or if a disk is listed twice.
pub(super) fn document(disks: &[Disk], listen: &[IpAddr]) -> Result<String, String> {
    let (mut backends, mut luns) = (Map::new(), Map::new());
    for (lun, disk) in disks.iter().enumerate() {
        let path = permanent_path(&disk.path, disk.is_device());
        let name = backend_name(&path);
        luns.insert(lun.to_string(), json!(name));
        if backends
            .insert(name, disk.backend(utf8_of(&path)?))
            .is_some()
        {
            return Err(format!("cannot serve {} twice", path.display()));
        }
    }
    let directory = state::default_path().map(|path| path.join("serve"));
    let directory = directory.as_deref().map_or(Ok("none"), utf8_of)?;
    let portals = listen.iter().flat_map(|address| {
        let portal = |protocol| json!({ "protocol": protocol, "listen": address });
        ["iscsi", "iser", "srp"].map(portal)
    });
    let target = json!({
        "name": "riser",
        "iqn": IQN,
        "portals": portals.collect::<Vec<_>>(),
        "luns": luns,
        "access": "open",
    });
    let document = json!({
        "backends": backends,
        "targets": [target],
        "state": { "directory": directory },
        "strict": true,
    });
    Ok(document.to_string())
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt as _;
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::config::Config;

    #[test]
    fn disk_options_are_parsed() {
        let disk: Disk = "a/b.img,size=1GiB,create".parse().unwrap();
        assert_eq!(disk.path, PathBuf::from("a/b.img"));
        assert_eq!(disk.size.as_deref(), Some("1GiB"));
        assert!(disk.create && !disk.read_only);
        let error = |text: &str| text.parse::<Disk>().unwrap_err();
        assert!(error("").starts_with("missing path"));
        assert!(error("a,create").contains("requires size"));
        assert!(error("a,sise=1").contains("`sise=1`"));
    }

    #[test]
    fn document_is_valid_configuration() {
        let disks = ["a.img,size=1GiB,create", "b.img,read_only"].map(|d| d.parse().unwrap());
        let text = document(&disks, &["127.0.0.1".parse().unwrap()]).unwrap();
        let config = Config::parse(&text, ORIGIN).unwrap();
        assert_eq!(config.targets.len(), 1);
        assert_eq!(config.backends.len(), 2);
        let invalid = ["a.img,size=x,create"].map(|d| d.parse().unwrap());
        let text = document(&invalid, &["127.0.0.1".parse().unwrap()]).unwrap();
        let mistake = Config::parse(&text, ORIGIN).unwrap_err().to_string();
        assert!(mistake.contains("backends.a.img:"), "{mistake}");
    }

    /// Initiators must not use a disk under the serial number of another one.
    #[test]
    fn name_depends_only_on_path() {
        let names = |paths: &[&str]| {
            let disks: Vec<Disk> = paths.iter().map(|path| path.parse().unwrap()).collect();
            let text = document(&disks, &["127.0.0.1".parse().unwrap()]).unwrap();
            let config = Config::parse(&text, ORIGIN).unwrap();
            let mut names: Vec<_> = config.backends.into_iter().map(|b| b.name).collect();
            names.sort();
            names
        };
        let both = names(&["/a/x.img", "/b/x.img"]);
        assert_ne!(both[0], both[1]);
        assert_eq!(both, names(&["/b/x.img", "/a/x.img"]));
        assert!(both.contains(&names(&["/b/x.img"])[0]));
        assert!(names(&["/c/ä b.img"])[0].starts_with("b.img:"));
        assert!(names(&["/c/ä"])[0].starts_with(':'));
        let invalid = Path::new(OsStr::from_bytes(b"/\xff"));
        assert!(utf8_of(invalid).unwrap_err().starts_with("invalid path"));
        let twice = ["/a/x.img", "/a//x.img"].map(|d| d.parse().unwrap());
        let error = document(&twice, &["127.0.0.1".parse().unwrap()]).unwrap_err();
        assert_eq!(error, "cannot serve /a/x.img twice");
    }

    #[test]
    fn device_keeps_name_of_its_link() {
        let directory = std::env::temp_dir().join(format!("riserd-serve-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let path = |name: &str| directory.join(name);
        for name in ["sda", "sdb"] {
            std::fs::write(path(name), name).unwrap();
        }
        symlink(path("sda"), path("by-id")).unwrap();
        let resolved = path("sda").canonicalize().unwrap();
        assert_eq!(permanent_path(&path("by-id"), false), resolved);
        assert_eq!(permanent_path(&path("by-id"), true), path("by-id"));
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
